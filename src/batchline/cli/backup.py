"""``batchline backup``: all of a service that keeps its data in a folder, in one file."""

from pathlib import Path
from typing import Any

import click

from batchline.cli.loading import load_settings
from batchline.cli.options import settings_options
from batchline.cli.output import show_bytes
from batchline.system import SystemClock


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--force", is_flag=True, help="Overwrite the file if it is there.")
@settings_options("data_dir", "config")
def backup(*, file: Path, force: bool, **flags: Any) -> None:
    """Write all batches, files, keys and money of a data folder to FILE, also while a service runs on it.

    The file holds prompts and answers as they are. Services on PostgreSQL and a bucket are backed up with the tools of
    these.
    """
    settings = load_settings(**flags)
    if settings.database_url is not None or settings.storage_url is not None:
        raise click.ClickException(
            "`batchline backup` takes a service that keeps everything in its data folder. Of this one, back up the "
            "PostgreSQL database, and then the bucket, with their own tools."
        )
    from batchline.backup.backup import back_up  # noqa: PLC0415 (not for --help)
    from batchline.backup.manifest import TransferError  # noqa: PLC0415

    try:
        manifest = back_up(
            settings.data_dir, file, overwrite=force, clock=SystemClock(), progress=show_bytes("Backing up")
        )
    except TransferError as refused:
        raise click.ClickException(str(refused)) from None
    for key in manifest.lost:
        click.echo(f"Warning: the object {key} was gone before the backup; a row still stands for it", err=True)
    click.echo(f"Backed up to {file}: {manifest.summary}.")
