"""What commands print: aligned columns for people, JSON for programs."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

import click

Row = Mapping[str, str | int | None]

json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_WIDEST_CELL = 80


def show_json(value: Row | Sequence[Row]) -> None:
    click.echo(json.dumps(value, indent=2))


def show_fields(fields: Mapping[str, str]) -> None:
    """One thing, a line a field."""
    width = max(map(len, fields))
    for name, value in fields.items():
        click.echo(f"{name:<{width}}  {value}")


def show_table(heads: Sequence[str], lines: Sequence[Sequence[str]], *, numbers: int = 0) -> None:
    """Of the columns, the last ``numbers`` are aligned to the right."""
    cells = [[_cell(text) for text in line] for line in (heads, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    words = len(heads) - numbers
    for line in cells:
        padded = [
            text.ljust(width) if column < words else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        click.echo("  ".join(padded).rstrip())


def moment(at: int | None, *, without: str = "-") -> str:
    """A time as people read it; ``without`` where there is none."""
    return without if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _cell(text: str) -> str:
    """Names come from outside: none may steer the terminal, and none may push the others off it."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text[:_WIDEST_CELL])


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
