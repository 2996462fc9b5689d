"""The files of a run: its input, its output, the failed lines and the journal. ``-`` is stdin or stdout."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder
from msgspec.json import encode as encode_json
from msgspec.structs import replace

from batchline.cli.destination import STANDARD, Destination, find_destination, stdout_destination
from batchline.cli.output import moment
from batchline.cli.run.steps import digest_of
from batchline.cli.text import printable
from batchline.domain.input_lines import InputLines
from batchline.domain.merge_patch import MergePatch

_DIGEST_CHARACTERS = 12
_object = Decoder(dict[str, Raw])


class RunFiles(Struct, frozen=True, kw_only=True):
    """The files of a run."""

    source: Path
    source_name: str
    """The name of the input in messages."""
    output: Destination
    errors: Destination
    journal: Path
    to_stdout: bool
    """Whether the output is copied to stdout at the end and then deleted."""
    first_row: int | None = None
    """The row of a table that the first line was made from, counted from 1; None if there is no table."""


@contextmanager
def open_files(source: str, output: str | None, errors: Path | None, *, patch: dict[str, Any]) -> Iterator[RunFiles]:
    """Yield the files of a run. Stdin is copied into a file first, because an upload may have to be repeated.

    ``patch`` is merged into the body of every line. Raise UsageError if the files cannot be used.
    """
    with TemporaryDirectory(prefix="batchline-") as temporary:
        files = _files(source, output, errors, Path(temporary))
        _refuse_equal_files(files)
        yield replace(files, source=_patched(files.source, patch, Path(temporary))) if patch else files


def confirm_again(source: Path, *results: Destination, ask: Callable[[str], bool]) -> None:
    """Ask before a finished job is run again, because that costs time and money. Raise ClickException if not.

    A job is finished if its results are newer than its input. What went to a device or a pipe is not there any more.
    """
    begun = source.stat().st_mtime
    saved = [each for each in results if each.path.exists() and each.path.stat().st_mtime > begun]
    if not saved:
        return
    at = moment(int(max(each.path.stat().st_mtime for each in saved)))
    finished = f"This job was finished at {at}: {printable(saved[0].name)} is newer than its input."
    if not ask(f"{finished} Run every line again?"):
        raise click.ClickException(f"{finished} Add --again to run every line again.")


def _patched(source: Path, patch: dict[str, Any], folder: Path) -> Path:
    """Return a copy of the input with the patch merged into every body. Lines that cannot be read stay as they are."""
    path, counted, merge = folder / "patched.jsonl", InputLines(), MergePatch.parse(encode_json(patch))
    with source.open("rb") as lines, path.open("wb") as file:
        for line in lines:
            text = counted.take(line)
            file.write(line if text is None else _patched_line(line, text, merge))
    return path


def _patched_line(line: bytes, text: bytes, patch: MergePatch) -> bytes:
    try:
        request = _object.decode(text)
        return encode_json(request | {"body": Raw(patch.apply(bytes(request["body"])))}) + b"\n"
    except (DecodeError, UnicodeDecodeError, RecursionError, KeyError):
        return line


def _files(source: str, output: str | None, errors: Path | None, temporary: Path) -> RunFiles:
    if source == STANDARD:
        path = _copy_of_stdin(temporary)
        # The journal is found again by the content: stdin has no name.
        place = Path(f"stdin-{digest_of(path)[:_DIGEST_CHARACTERS]}")
    else:
        path = _existing(source)
        place = _without_suffix(path)
    to_stdout = output == STANDARD or (output is None and source == STANDARD)
    named = _added(place, ".output.jsonl") if output is None else Path(output)
    staged = temporary / "output.jsonl"
    saved = stdout_destination(staged) if to_stdout else find_destination(named, staged=staged)
    if saved.path == staged:
        beside, journal = place, _added(place, ".stdout.batchline")
    else:
        beside, journal = place if output is None else _without_suffix(named), _added(named, ".batchline")
    return RunFiles(
        source=path,
        source_name="stdin" if source == STANDARD else source,
        output=saved,
        errors=find_destination(errors or _added(beside, ".errors.jsonl"), staged=temporary / "errors.jsonl"),
        journal=journal,
        to_stdout=to_stdout,
    )


def _without_suffix(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".jsonl"))


def _added(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _existing(source: str) -> Path:
    path = Path(source)
    if not path.exists():
        raise click.UsageError(f"There is no file {source!r}")
    if not path.is_file():
        raise click.UsageError(f"{source!r} is not a file")
    return path


def _copy_of_stdin(folder: Path) -> Path:
    if sys.stdin.isatty():
        click.echo("Reading the lines from the terminal; end them with Ctrl-D.", err=True)
    path = folder / "stdin.jsonl"
    with path.open("wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    return path


def _refuse_equal_files(files: RunFiles) -> None:
    if len({os.path.realpath(path) for path in (files.source, files.output.path, files.errors.path)}) < 3:
        raise click.UsageError("INPUT, --output and --errors must be three different files")
