"""``batchline migrate``: upgrades the database schema before processes of a new version start."""

import asyncio
from typing import Any

import click

from batchline.cli.help import Command
from batchline.cli.loading import load_settings
from batchline.cli.output import say
from batchline.cli.store import store_options


@click.command(cls=Command)
@click.option(
    "--wait",
    "waits",
    is_flag=True,
    help="Change nothing, and wait until another process has upgraded the PostgreSQL database.",
)
@store_options
def migrate(*, waits: bool, **flags: Any) -> None:
    """Upgrade the database schema. `serve` does this when it starts; `api` and `worker` do not."""
    settings = load_settings(**flags)
    from batchline.app import StartupError, await_migration, migrate_store  # noqa: PLC0415 (not for --help)

    try:
        if waits:
            asyncio.run(await_migration(settings, on_wait=_Notice()))
            where = "the PostgreSQL database"
        else:
            where = asyncio.run(migrate_store(settings))
    except StartupError as error:
        raise click.ClickException(str(error)) from None
    say(f"Up to date: {where}")


class _Notice:
    """Says what is waited for, each time that it changes."""

    def __init__(self) -> None:
        self._said = ""

    def __call__(self, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            say(f"Waiting for the PostgreSQL database: {reason}", err=True)
