"""``batchline restore``: a service from its backup, into any of the backends."""

import asyncio
from pathlib import Path
from typing import Any

import click

from batchline.cli.loading import load_settings
from batchline.cli.options import settings_options
from batchline.cli.output import show_bytes


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@settings_options("data_dir", "database_url", "database_pooler", "storage_url", "config")
def restore(*, file: Path, **flags: Any) -> None:
    """Put the backup FILE into a data folder that is empty or not there yet, or into an empty PostgreSQL database and
    a bucket where the settings name them.

    Open batches go on when the service is started. Do not start the old one again: both would run them.
    """
    settings = load_settings(**flags)
    from batchline.app import StartupError  # noqa: PLC0415 (all of the service: not for --help)
    from batchline.app.backends import restore_backup  # noqa: PLC0415
    from batchline.backup.archive import open_archive  # noqa: PLC0415
    from batchline.backup.manifest import TransferError  # noqa: PLC0415

    try:
        with open_archive(file, show_bytes("Checking")) as archive:
            asyncio.run(restore_backup(settings, archive, show_bytes("Restoring")))
    except (StartupError, TransferError) as refused:
        raise click.ClickException(str(refused)) from None
    shared = settings.database_url is not None and settings.storage_url is not None
    roles = "batchline serve, or batchline api and batchline worker" if shared else "batchline serve"
    click.echo(f"Restored: {archive.manifest.summary}. Start it with: {roles}")
