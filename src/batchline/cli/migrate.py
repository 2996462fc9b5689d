"""``batchline migrate``: bring the database up to date, before processes of a new version start."""

import asyncio
from typing import Any

import click

from batchline.cli.loading import load_settings
from batchline.cli.store import store_options


@click.command()
@store_options
def migrate(**flags: Any) -> None:
    """Bring the database up to date. `serve` does that by itself; `api` and `worker` do not."""
    settings = load_settings(**flags)
    from batchline.app import StartupError, migrate_store  # noqa: PLC0415 (all of the service: not for --help)

    try:
        where = asyncio.run(migrate_store(settings))
    except StartupError as refused:
        raise click.ClickException(str(refused)) from None
    click.echo(f"Up to date: {where}")
