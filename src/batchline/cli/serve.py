"""``batchline serve``: everything in one process."""

import sys
from typing import Any

import click

from batchline.cli.loading import load_settings
from batchline.cli.options import settings_options


@click.command()
@settings_options()
def serve(**flags: Any) -> None:
    """Run the service: API, worker, database and files in one process."""
    settings = load_settings(**flags)
    from batchline.app import StartupError, run  # noqa: PLC0415 (all of the service: not for --help)

    try:
        code = run(settings, progress=_show_download)
    except StartupError as refused:
        raise click.ClickException(str(refused)) from None
    raise SystemExit(code)


def _show_download(done: int, total: int) -> None:
    """On a terminal one line that is drawn anew; elsewhere one at the beginning and one at the end."""
    if sys.stderr.isatty():
        text = f"\rDownloading the embedded model, once: {done // 1_000_000} of {total // 1_000_000} MB"
        click.echo(text, err=True, nl=done == total)
    elif done in (0, total):
        click.echo(f"Embedded model: {done // 1_000_000} of {total // 1_000_000} MB downloaded", err=True)
