"""Tables, bars and live views for people. They fit the terminal; elsewhere they are plain text of any width."""

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

import click
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from batchline.cli.text import printable
from batchline.client.models import Counts

_PLAIN_WIDTH = 1000
"""The width where there is no terminal: nothing is cut off."""
_STYLES = {"completed": "green", "failed": "red", "expired": "red", "cancelled": "yellow", "cancelling": "yellow"}


def console(stream: TextIO | None = None) -> Console:
    """Return the console of a stream, stdout if none is given. It interprets nothing in the texts that it prints."""
    file = stream or sys.stdout
    width = None if file.isatty() else _PLAIN_WIDTH
    return Console(file=file, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False)


def show(view: RenderableType) -> None:
    """Print a view to stdout. Without a terminal, lines have no spaces at their end."""
    shown = console()
    if shown.is_terminal:
        shown.print(view)
        return
    with shown.capture() as capture:
        shown.print(view)
    click.echo("\n".join(line.rstrip() for line in capture.get().splitlines()))


def table(
    heads: Sequence[str], rows: Iterable[Sequence[Text | str]], *, right: Iterable[str] = (), gap: int = 2
) -> Table:
    """Return a table without lines. If the terminal is too narrow, the cells of the last column are cut.

    Columns named in ``right`` are aligned to the right. ``gap`` is the number of spaces between columns.
    """
    aligned = set(right)
    cells = [[cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row] for row in rows]
    made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold", show_edge=False)
    for number, head in enumerate(heads):
        made.add_column(
            head,
            justify="right" if head in aligned else "left",
            # A column that may wrap is the one that rich makes narrower; its texts are cut instead.
            no_wrap=number < len(heads) - 1,
            overflow="ellipsis",
        )
    for row in cells:
        for cell in row:
            cell.no_wrap = True
        made.add_row(*row)
    return made


def status_text(status: str) -> Text:
    """Return a status in its colour."""
    return Text(printable(status), style=_STYLES.get(status, ""))


def bar_text(counts: Counts, *, width: int) -> Text:
    """Return a bar of the lines that are done for stdout, with the failed ones in red, and the share in percent."""
    full, empty = ("█", "░") if "utf" in (sys.stdout.encoding or "").lower() else ("#", ".")
    total = max(1, counts.total)
    done = int(counts.done / total * width)
    failed = min(done, -(-counts.failed * width // total)) if counts.failed else 0
    percent = f" {int(counts.done / total * 100):3} %"
    return Text.assemble(
        (full * (done - failed), "green"), (full * failed, "red"), (empty * (width - done), "dim"), percent
    )
