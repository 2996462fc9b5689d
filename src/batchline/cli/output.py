"""Prints what commands show: aligned columns for people, JSON for programs, and the progress of a transfer."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from msgspec import Raw

from batchline.cli.options import flag, settings_options
from batchline.cli.text import format_size, printable, wrapped

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


def place_flags(base_url: str | None, flags: Mapping[str, Any]) -> str:
    """Return the flags that chose the server or the data folder, for a printed command; empty if none was given."""
    given = {"base_url": base_url, **{name: flags.get(name) for name in ("data_dir", "config")}}
    return "".join(f" {flag(name)} {shlex.quote(str(value))}" for name, value in given.items() if value is not None)


_EXIT_CODES = {"0": "0 success", "1": "1 failure", "2": "2 wrong usage", "4": "4 wrong credentials"}
_MAX_CELL_WIDTH = 80


def exit_codes(*codes: str) -> str:
    """Return the text on exit codes for the help of a command; the usual ones need only their number."""
    return f"Exit codes: {', '.join(_EXIT_CODES.get(code, code) for code in codes)}."


def say(text: str, *, indent: int = 0, begun: int = 0, err: bool = False) -> None:
    """Print a text. On a terminal it is wrapped between words, and its further lines are indented.

    ``begun`` is the number of columns that its first line has already.
    """
    click.echo(wrapped(text, indent=indent, begun=begun, err=err), err=err)


def ask(question: str, *, err: bool = False) -> bool:
    """Ask a person, who has to answer yes."""
    return click.confirm(
        wrapped(f"{question} [y/N]:", indent=2, err=err), prompt_suffix=" ", show_default=False, err=err
    )


def show_json(value: object) -> None:
    """Print a value as indented JSON."""
    click.echo(json.dumps(value, indent=2))


def copy_to_stdout(path: Path, *, advice: str) -> None:
    """Copy a file to stdout. Raise ClickException with the advice if stdout cannot take it."""
    try:
        with path.open("rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise  # the reader of stdout has gone, which click knows how to end with
    except OSError as error:
        # The buffer is written once more when the process ends. That would fail again and change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.ClickException(f"stdout cannot be written: {error.strerror}. {advice}.") from None


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
    """Print a table. The last ``numbers`` columns are aligned to the right.

    A table that is wider than the terminal is printed as one block of fields per row.
    """
    cells = [[printable(text[:_MAX_CELL_WIDTH]) for text in line] for line in (heads, *lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if sys.stdout.isatty() and sum(widths) + 2 * (len(widths) - 1) > shutil.get_terminal_size().columns:
        _show_blocks(cells)
        return
    text_columns = len(heads) - numbers
    for line in cells:
        padded = [
            text.ljust(width) if column < text_columns else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        click.echo("  ".join(padded).rstrip())


def _show_blocks(cells: Sequence[Sequence[str]]) -> None:
    """Print each row as a block, with the heads in front of its cells. Empty cells are left out."""
    heads, *rows = cells
    for number, row in enumerate(rows):
        if number:
            click.echo("")
        show_fields({head: cell for head, cell in zip(heads, row, strict=True) if cell})


def moment(at: int | None, *, without: str = "-") -> str:
    """Return a time in ISO 8601, or ``without`` if there is none."""
    return without if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """Provide a callback that shows how far something is. On a terminal it redraws one line, and ends it at the end.

    Elsewhere it prints nothing, because a log would get a line for each step.
    """
    shown = ""

    def show(text: str) -> None:
        nonlocal shown
        if text != shown and sys.stderr.isatty():
            click.echo(f"\r{text.ljust(len(shown))}", err=True, nl=False)
            shown = text

    try:
        yield show
    finally:
        if shown:
            click.echo(err=True)


@contextmanager
def byte_progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Provide a callback for progress in bytes, which is shown in one line."""
    with progress_line() as show:
        yield lambda done, total: show(f"{what}: {format_size(done)} of {format_size(total)}")
