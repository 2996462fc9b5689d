"""Commands that are a process of the service, until it is told to stop."""

import sys
from collections.abc import Callable, Coroutine
from typing import Any

import click

from batchline.cli.loading import load_settings
from batchline.settings import Settings

Role = Callable[[Settings, Callable[[int, int], None]], Coroutine[Any, Any, None]]


def be(name: str, flags: dict[str, Any]) -> None:
    """Be the role of that name with these settings."""
    settings = load_settings(**flags)
    from batchline import app  # noqa: PLC0415 (all of the service: not for --help)

    role: Role = getattr(app, name)
    try:
        app.run(role(settings, _show_download))
    except app.StartupError as refused:
        raise click.ClickException(str(refused)) from None


def _show_download(done: int, total: int) -> None:
    """On a terminal one line that is drawn anew; elsewhere one at the beginning and one at the end."""
    if sys.stderr.isatty():
        text = f"\rDownloading the embedded model, once: {done // 1_000_000} of {total // 1_000_000} MB"
        click.echo(text, err=True, nl=done == total)
    elif done in (0, total):
        click.echo(f"Embedded model: {done // 1_000_000} of {total // 1_000_000} MB downloaded", err=True)
