"""How far a backup or a restore is, on a terminal."""

import sys
from collections.abc import Callable

import click

_STEP = 1_000_000


def show_bytes(what: str) -> Callable[[int, int], None]:
    """One line that is drawn anew; elsewhere nothing."""
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        if sys.stderr.isatty() and (done // _STEP != shown or done == total):
            shown = done // _STEP
            click.echo(f"\r{what}: {done // _STEP} of {total // _STEP} MB", err=True, nl=done == total)

    return show
