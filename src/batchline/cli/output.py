"""Prints what commands show: aligned columns for people, JSON for programs, and the progress of a transfer."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import click

Row = Mapping[str, str | int | None]

json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_MAX_CELL_WIDTH = 80
_MB = 1_000_000


def show_json(value: object) -> None:
    """Print a value as indented JSON."""
    click.echo(json.dumps(value, indent=2))


def show_fields(fields: Mapping[str, str]) -> None:
    """Print one object, one field per line."""
    width = max(map(len, fields))
    for name, value in fields.items():
        click.echo(f"{name:<{width}}  {value}")


def show_table(heads: Sequence[str], lines: Sequence[Sequence[str]], *, numbers: int = 0) -> None:
    """Print a table. The last ``numbers`` columns are aligned to the right."""
    cells = [[printable(text[:_MAX_CELL_WIDTH]) for text in line] for line in (heads, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    text_columns = len(heads) - numbers
    for line in cells:
        padded = [
            text.ljust(width) if column < text_columns else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        click.echo("  ".join(padded).rstrip())


def moment(at: int | None, *, without: str = "-") -> str:
    """Return a time in ISO 8601, or ``without`` if there is none."""
    return without if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def printable(text: str) -> str:
    """Escape what is not printable: text from a client, a server or a file must not control the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def show_bytes(what: str) -> Callable[[int, int], None]:
    """Return a callback for progress in bytes. It redraws one line on a terminal and prints nothing elsewhere."""
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        if sys.stderr.isatty() and (done // _MB != shown or done == total):
            shown = done // _MB
            click.echo(f"\r{what}: {done // _MB} of {total // _MB} MB", err=True, nl=done == total)

    return show
