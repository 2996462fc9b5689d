"""Prints what commands show: aligned columns for people, JSON for programs, and the progress of a transfer."""

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import click
import msgspec
from msgspec import Raw

from batchline.cli.options import settings_options
from batchline.cli.text import printable

_Command = TypeVar("_Command", bound=Callable[..., Any])

Row = Mapping[str, str | int | None]

json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
base_url_option = click.option(
    "--base-url", metavar="URL", help="Server to use. [BATCHLINE_BASE_URL, OPENAI_BASE_URL; none: the data folder]"
)


def client_options(command: _Command) -> _Command:
    """Add the options that say which server or data folder a client command uses, and ``--json``."""
    for option in (settings_options("data_dir", "config"), json_flag, base_url_option):
        command = option(command)
    return command


_EXIT_CODES = {"0": "0 success", "1": "1 failure", "2": "2 wrong usage", "4": "4 wrong credentials"}
_MAX_CELL_WIDTH = 80
_MB = 1_000_000


def exit_codes(*codes: str) -> str:
    """Return the text on exit codes for the help of a command; the usual ones need only their number."""
    return f"Exit codes: {', '.join(_EXIT_CODES.get(code, code) for code in codes)}."


def say(text: str, *, indent: int = 0, begun: int = 0, err: bool = False) -> None:
    """Print a text. On a terminal it is wrapped between words, and its further lines are indented.

    ``begun`` is the number of columns that its first line has already.
    """
    stream = sys.stderr if err else sys.stdout
    if stream.isatty():
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(
            text,
            width,
            initial_indent=" " * begun,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        text = text[begun:]
    click.echo(text, err=err)


def show_json(value: object) -> None:
    """Print a value as indented JSON."""
    click.echo(json.dumps(value, indent=2))


def show_object(raw: bytes | Raw) -> None:
    """Print an object of the server as indented JSON, with its fields in the server's order."""
    click.echo(msgspec.json.format(bytes(raw), indent=2))


def show_objects(raws: Sequence[bytes | Raw]) -> None:
    """Print objects of the server as one JSON array."""
    show_object(b"[%b]" % b",".join(map(bytes, raws)))


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


def show_bytes(what: str) -> Callable[[int, int], None]:
    """Return a callback for progress in bytes. It redraws one line on a terminal and prints nothing elsewhere."""
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        if sys.stderr.isatty() and (done // _MB != shown or done == total):
            shown = done // _MB
            click.echo(f"\r{what}: {done // _MB} of {total // _MB} MB", err=True, nl=done == total)

    return show
