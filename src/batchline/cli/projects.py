"""``batchline projects``: what keys belong to. Works beside a running service."""

from typing import Any

import click

from batchline.cli.output import json_flag, moment, show_json, show_table
from batchline.cli.store import in_store, store_options


@click.group()
def projects() -> None:
    """List projects.

    Projects are made by: batchline keys create --project NAME
    """


@projects.command("list")
@json_flag
@store_options
def list_projects(as_json: bool, **flags: Any) -> None:
    """Show every project and its organization."""
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
