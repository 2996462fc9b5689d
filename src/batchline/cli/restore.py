"""``batchline restore``: restores a service from its backup, into any of the backends."""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from batchline.cli.help import Command
from batchline.cli.loading import load_settings
from batchline.cli.options import settings_options
from batchline.cli.output import byte_progress, say
from batchline.cli.text import describe_backup


@click.command(short_help="Restore a backup.", cls=Command)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@settings_options("data_dir", "database_url", "database_pooler", "storage_url", "config")
def restore(*, file: Path, **flags: Any) -> None:
    """Restore the backup FILE into a data folder, or into PostgreSQL and a bucket if the settings name them.

    The data folder must be empty or must not exist yet; the database must be empty. Unfinished batches continue when
    the service is started. Do not start the old service again: both would run these batches.
    """
    settings = load_settings(**flags)
    from batchline.app import StartupError  # noqa: PLC0415 (all of the service: not for --help)
    from batchline.app.maintenance import restore_backup  # noqa: PLC0415
    from batchline.backup.archive import open_archive  # noqa: PLC0415
    from batchline.backup.manifest import TransferError  # noqa: PLC0415

    try:
        with ExitStack() as stack:
            with byte_progress("Checking") as progress:
                archive = stack.enter_context(open_archive(file, progress))
            with byte_progress("Restoring") as progress:
                asyncio.run(restore_backup(settings, archive, progress))
    except (StartupError, TransferError) as error:
        raise click.ClickException(str(error)) from None
    shared = settings.database_url is not None and settings.storage_url is not None
    roles = "batchline serve, or batchline api and batchline worker" if shared else "batchline serve"
    say(f"Restored: {describe_backup(archive.manifest)}. Start it with the same settings: {roles}", indent=2)
