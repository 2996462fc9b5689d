"""``batchline projects``: lists and renames the projects that keys belong to. The service may run meanwhile."""

from typing import Any

import click

from batchline.cli.help import Group
from batchline.cli.output import Row, json_flag, moment, show_json, show_table
from batchline.cli.store import Name, find_project, in_store, store_options
from batchline.domain.records import Project
from batchline.ports import Store


@click.group(cls=Group)
def projects() -> None:
    """List and rename projects.

    To create a project, run: batchline keys create --project NAME
    """


@projects.command("list")
@json_flag
@store_options
def list_projects(as_json: bool, **flags: Any) -> None:
    """List all projects with their organizations."""
    found = in_store(flags, lambda store: store.projects())
    if as_json:
        show_json([_row(project) for project in found])
        return
    show_table(
        ("name", "project_id", "organization", "created_at"),
        [(project.name, project.id, project.organization, moment(project.created_at)) for project in found],
    )


@projects.command()
@click.argument("project")
@click.argument("name", type=Name())
@json_flag
@store_options
def rename(project: str, name: str, as_json: bool, **flags: Any) -> None:
    """Give a project another name. Its id stays. PROJECT is its id, or a name that only one organization uses."""

    async def change(store: Store) -> Project:
        found = await find_project(store, project)
        if not await store.rename_project(found.id, name=name):
            raise click.ClickException(f"Another project of {found.organization} is called {name!r}")
        return await find_project(store, found.id)

    renamed = in_store(flags, change)
    if as_json:
        show_json(_row(renamed))
    else:
        click.echo(f"{renamed.id} is called {name}")


def _row(project: Project) -> Row:
    return {
        "name": project.name,
        "project_id": project.id,
        "organization": project.organization,
        "organization_id": project.organization_id,
        "created_at": project.created_at,
    }
