"""``batchline backup``: saves everything that a service keeps in its data folder to one file."""

from pathlib import Path
from typing import Any

import click

from batchline.cli.help import Command
from batchline.cli.loading import load_settings
from batchline.cli.options import settings_options
from batchline.cli.output import byte_progress, say
from batchline.cli.text import describe_backup
from batchline.system import SystemClock


@click.command(short_help="Save everything in a data folder to one file.", cls=Command)
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--force", is_flag=True, help="Overwrite the file if it exists.")
@settings_options("data_dir", "config")
def backup(*, file: Path, force: bool, **flags: Any) -> None:
    """Write all batches, files, keys and balances of a data folder to FILE. A service may run on it meanwhile.

    FILE contains prompts and answers in plain text. If the service uses PostgreSQL and a bucket, back these up with
    their own tools instead.
    """
    settings = load_settings(**flags)
    if settings.database_url is not None or settings.storage_url is not None:
        raise click.ClickException(
            "`batchline backup` is only for a service that keeps everything in its data folder. This one uses "
            "PostgreSQL or a bucket: back up the database first, and then the bucket, with their own tools."
        )
    from batchline.backup.backup import back_up  # noqa: PLC0415 (not for --help)
    from batchline.backup.manifest import TransferError  # noqa: PLC0415

    try:
        with byte_progress("Backing up") as progress:
            manifest = back_up(settings.data_dir, file, overwrite=force, clock=SystemClock(), progress=progress)
    except TransferError as error:
        raise click.ClickException(str(error)) from None
    for key in manifest.lost:
        say(
            f"Warning: the object {key} was already missing before the backup; the database still refers to it",
            indent=2,
            err=True,
        )
    say(f"Backed up to {file}: {describe_backup(manifest)}.", indent=2)
