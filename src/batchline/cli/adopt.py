"""``batchline adopt``: makes a database and a folder or bucket belong together, if the operator knows that they do."""

import asyncio
from typing import Any

import click

from batchline.cli.help import Command
from batchline.cli.loading import load_settings
from batchline.cli.options import settings_options
from batchline.cli.output import ask, say


@click.command(short_help="Make a database and its objects belong together.", cls=Command)
@click.option("--yes", is_flag=True, help="Do not ask.")
@settings_options("data_dir", "database_url", "database_pooler", "storage_url", "config")
def adopt(*, yes: bool, **flags: Any) -> None:
    """Give the database and the objects that the settings name a new identity, which both share.

    The service refuses to start on a database and objects that do not belong together, because objects without a row
    are deleted after some time. Use this command if you know that they do belong together, or to separate a copy from
    its original. Stop the service first. Every other service on this database or on these objects refuses to go on.
    """
    settings = load_settings(**flags)
    from batchline.app import StartupError, adopt_objects  # noqa: PLC0415 (all of the service: not for --help)
    from batchline.app.backends import database_name, objects_name  # noqa: PLC0415

    pair = f"{database_name(settings)} and {objects_name(settings)}"
    if not yes and not ask(f"Make {pair} belong together?"):
        raise click.Abort
    try:
        asyncio.run(adopt_objects(settings))
    except StartupError as error:
        raise click.ClickException(str(error)) from None
    say(f"These belong together now: {pair}", indent=2)
