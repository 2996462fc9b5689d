"""``batchline projects``: manages the projects that keys belong to. The service may run meanwhile."""

import sys
from typing import Any

import click

from batchline.cli.help import Group
from batchline.cli.output import Row, ask, json_flag, moment, show_fields, show_json, show_table
from batchline.cli.store import Money, Name, describe_batches, find_project, in_store, now, store_options
from batchline.domain.money import units
from batchline.domain.records import Project
from batchline.ports import Store

_NO_BUDGET = "none"


class _Budget(click.ParamType["int | None"]):
    """An amount in units, or none."""

    name = "amount"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        return None if value == _NO_BUDGET else Money().convert(value, param, ctx)


@click.group(short_help="List, rename and delete projects, and set their budgets.", cls=Group)
def projects() -> None:
    """List, rename and delete projects, and set what each may spend in a day.

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
        ("name", "project_id", "organization", "created_at", "daily_budget"),
        [_line(project) for project in found],
        numbers=1,
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


# A negative amount looks like an option, but must be refused as an amount.
@projects.command("set-budget", context_settings={"ignore_unknown_options": True})
@click.argument("project")
@click.argument("amount", type=_Budget())
@json_flag
@store_options
def set_budget(project: str, amount: int | None, as_json: bool, **flags: Any) -> None:
    """Set what a project may spend in a day, from 00:00 UTC. A running service uses it within 5 s.

    PROJECT is its id, or a name that only one organization uses. AMOUNT is in units, with at most nine decimals, and
    comes before daily_budget in the settings file; `none` removes it again. It counts while metering is on.
    """

    async def change(store: Store) -> Project:
        found = await find_project(store, project)
        await store.set_daily_budget(found.id, daily_budget=amount)
        return await find_project(store, found.id)

    changed = in_store(flags, change)
    if as_json:
        show_json(_row(changed))
    else:
        show_fields({"name": changed.name, "project_id": changed.id, "daily_budget": _budget(changed)})


@projects.command(short_help="Delete a project with its keys and files.")
@click.argument("project")
@click.option("--yes", is_flag=True, help="Do not ask. Without a terminal it is needed.")
@json_flag
@store_options
def delete(project: str, yes: bool, as_json: bool, **flags: Any) -> None:
    """Delete a project that has no open batch, with its keys, files and webhooks.

    PROJECT is its id, or a name that only one organization uses. Its files are gone for good: a service deletes them
    within a minute. Its batches can be read no more. What it used stays in the ledger and in `batchline usage`, and its
    name is free again.
    """
    found = in_store(flags, lambda store: find_project(store, project))
    if not yes:
        _confirm(found)

    async def change(store: Store) -> None:
        deletion = await store.delete_project(found.id, at=now())
        if deletion.open_batches:
            raise click.ClickException(f"{found.name} has {describe_batches(deletion.open_batches)}")

    in_store(flags, change)
    if as_json:
        show_json({"project_id": found.id, "deleted": True})
    else:
        click.echo(f"{found.name} ({found.id}) is deleted")


def _confirm(project: Project) -> None:
    if not sys.stdin.isatty():
        raise click.UsageError("This deletes all files of the project. Without a terminal, confirm it with --yes")
    name = f"{project.name} of {project.organization}"
    if not ask(f"Delete {name} with all of its keys, files and webhooks?", err=True):
        raise click.Abort


def _line(project: Project) -> tuple[str, ...]:
    return (project.name, project.id, project.organization, moment(project.created_at), _budget(project))


def _budget(project: Project) -> str:
    return "-" if project.daily_budget is None else units(project.daily_budget)


def _row(project: Project) -> Row:
    return {
        "name": project.name,
        "project_id": project.id,
        "organization": project.organization,
        "organization_id": project.organization_id,
        "created_at": project.created_at,
        "daily_budget": None if project.daily_budget is None else units(project.daily_budget),
    }
