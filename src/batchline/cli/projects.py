"""``batchline projects``: lists the projects that keys belong to. The service may run meanwhile."""

from typing import Any

import click

from batchline.cli.help import Group
from batchline.cli.output import json_flag, moment, show_json, show_table
from batchline.cli.store import in_store, store_options


@click.group(cls=Group)
def projects() -> None:
    """List projects.

    To create a project, run: batchline keys create --project NAME
    """


@projects.command("list")
@json_flag
@store_options
def list_projects(as_json: bool, **flags: Any) -> None:
    """List all projects with their organizations."""
    found = in_store(flags, lambda store: store.projects())
    if as_json:
        show_json(
            [
                {
                    "name": project.name,
                    "project_id": project.id,
                    "organization": project.organization,
                    "organization_id": project.organization_id,
                    "created_at": project.created_at,
                }
                for project in found
            ]
        )
        return
    show_table(
        ("name", "project_id", "organization", "created_at"),
        [(project.name, project.id, project.organization, moment(project.created_at)) for project in found],
    )
