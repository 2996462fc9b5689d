"""``batchline migrate``: upgrades the database schema before processes of a new version start."""

import asyncio
from typing import Any

import click

from batchline.cli.help import Command
from batchline.cli.loading import load_settings
from batchline.cli.store import store_options


@click.command(cls=Command)
@store_options
def migrate(**flags: Any) -> None:
    """Upgrade the database schema. `serve` does this when it starts; `api` and `worker` do not."""
    settings = load_settings(**flags)
    from batchline.app import StartupError, migrate_store  # noqa: PLC0415 (all of the service: not for --help)

    try:
        where = asyncio.run(migrate_store(settings))
    except StartupError as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"Up to date: {where}")
