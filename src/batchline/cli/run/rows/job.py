"""The job of a table: parts of at most 50,000 rows, each of which is a batch, and the table with the answers.

The parts are in a folder beside the output, with the journal of each, so that an interrupted job is resumed. If the
output is stdout, a device or a pipe, the folder is beside the table. Parts that are complete do not run again. When the
output is written, the folder is deleted.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import click
from msgspec import Struct
from msgspec.json import decode as decode_json
from msgspec.json import encode as encode_json
from msgspec.structs import replace

from batchline import durable
from batchline.cli.destination import file_destination
from batchline.cli.run.files import RunFiles
from batchline.cli.run.report import JobBill
from batchline.cli.run.rows.requests import AnswerColumns, RowRequests, answer_columns, read_outcomes
from batchline.cli.run.rows.writer import row_writer
from batchline.cli.run.steps import digest_of
from batchline.client.models import Counts
from batchline.locks import AlreadyLocked, try_lock
from batchline.pipeline.rows.requests import row_id
from batchline.pipeline.rows.table import Row, Rows

_MAX_PART_LINES = 50_000
_MAX_PART_BYTES = 90 * 1024 * 1024
"""Both stay within the usual limits of a batch and of an upload."""
_KEY_FILE = "job"
_BILL_FILE = "bill"


class Part(Struct, frozen=True, kw_only=True):
    """The rows of one batch."""

    first: int
    """The number of its first row, counted from 1."""
    rows: int
    files: RunFiles

    @property
    def is_complete(self) -> bool:
        """Whether its results were saved."""
        files = self.files
        return not files.journal.exists() and (files.output.path.exists() or files.errors.path.exists())


class RowsJob:
    """A table, its requests, and the output that they become."""

    def __init__(self, source: Path, rows: Rows, requests: RowRequests, *, output: Path, folder: Path) -> None:
        """``folder`` is where the parts are kept until the job is finished."""
        self._source, self._rows, self._requests = source, rows, requests
        self._output, self._folder = output, folder

    @property
    def is_begun(self) -> bool:
        """Whether an earlier run began this job and did not finish it."""
        return (self._folder / _KEY_FILE).exists()

    def give_up(self, give_up_part: Callable[[RunFiles], object]) -> None:
        """Give up each part that an earlier run began and did not finish, and empty the folder. It must be locked."""
        for journal in sorted(self._folder.glob("*.journal")):
            give_up_part(self._files(journal.with_suffix(".jsonl")))
        for path in self._folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep other runs out of it meanwhile. Raise ClickException if that cannot be.

        The folder is deleted at the end if no job was begun in it.
        """
        if self._folder.is_file():
            raise click.ClickException(
                f"{self._folder} belongs to a run without --prompt that was not finished. Repeat that command to "
                "resume it, or choose another --output."
            )
        fd = self._lock()
        try:
            yield
        finally:
            # After forget(), the folder may be that of another run.
            if self._is_folder(fd) and not self.is_begun:
                self.forget()
            os.close(fd)

    def _lock(self) -> int:
        """Return the descriptor of the folder, which holds the lock."""
        while True:
            self._folder.mkdir(exist_ok=True)
            try:
                fd = os.open(self._folder, os.O_RDONLY)
            except FileNotFoundError:
                continue  # another run has ended and deleted it since
            try:
                try_lock(fd)
            except AlreadyLocked:
                os.close(fd)
                raise click.ClickException(f"Another run is working on this output ({self._folder})") from None
            if self._is_folder(fd):
                return fd
            os.close(fd)

    def _is_folder(self, fd: int) -> bool:
        """Return whether a descriptor is that of the folder, which another run may have deleted and made anew."""
        with suppress(FileNotFoundError):
            return os.path.samestat(self._folder.stat(), os.fstat(fd))
        return False

    def prepare(self) -> list[Part]:
        """Write the parts, or find those of an earlier run. Raise ClickException if that was another job."""
        key, path = self._key(), self._folder / _KEY_FILE
        if self.is_begun and path.read_text() != key:
            raise click.ClickException(
                f"{self._folder} belongs to a job with another table, prompt or model that was not finished. Repeat "
                "that command to resume it, or add --restart to give it up."
            )
        parts = list(self._write_parts())
        if not parts:
            raise click.UsageError(f"{self._source.name} has no rows")
        path.write_text(key)
        return parts

    def run(self, parts: list[Part], run_part: Callable[[RunFiles], object]) -> Counts:
        """Run each part that is not complete, write the output, and return the counts of all rows."""
        for number, part in enumerate(parts, 1):
            if len(parts) > 1:
                click.echo(
                    f"Part {number} of {len(parts)}: rows {part.first:,} to {part.first + part.rows - 1:,}", err=True
                )
            if not part.is_complete:
                run_part(part.files)
        self._refuse_changed_table()
        return self._join(parts)

    def load_bill(self) -> JobBill:
        """Return the bill of the parts that are complete."""
        path = self._folder / _BILL_FILE
        return decode_json(path.read_bytes(), type=JobBill) if path.exists() else JobBill()

    def save_bill(self, bill: JobBill) -> None:
        """Save the bill of the parts that are complete, for a run that resumes the job."""
        new = self._folder / f"{_BILL_FILE}.part"
        new.write_bytes(encode_json(bill))
        new.replace(self._folder / _BILL_FILE)

    def forget(self) -> None:
        """Delete the folder of the job. Its output must be where the user wants it."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _refuse_changed_table(self) -> None:
        """Raise ClickException if the table is not the one that the requests were made from."""
        if (self._folder / _KEY_FILE).read_text() != self._key():
            raise click.ClickException(
                f"{self._source} has changed since this job was begun, so its rows and the answers do not belong "
                "together. Restore the table and run the same command again, or add --restart to give the job up."
            )

    def _key(self) -> str:
        """Return a digest of everything that the requests are made from."""
        made_from = encode_json([digest_of(self._source), self._requests])
        return hashlib.sha256(made_from).hexdigest()

    def _write_parts(self) -> Iterator[Part]:
        lines = self._requests.lines(self._rows)
        for index, (number, line) in enumerate(_starts(lines), 1):
            path = self._folder / f"part-{index}.jsonl"
            with path.open("wb") as file:
                count = _fill(file.write, line, lines)
            yield Part(first=number, rows=count, files=replace(self._files(path), first_row=number))

    def _files(self, path: Path) -> RunFiles:
        def beside(suffix: str) -> Path:
            return path.with_suffix(suffix)

        return RunFiles(
            source=path,
            source_name=self._source.name,
            output=file_destination(beside(".output")),
            errors=file_destination(beside(".errors")),
            journal=beside(".journal"),
            to_stdout=False,
        )

    def _join(self, parts: list[Part]) -> Counts:
        columns = answer_columns(self._rows.columns, self._requests.prompts.schema)
        part_file = self._output.with_name(f"{self._output.name}.part")
        rows, failed = iter(self._rows), 0
        with row_writer(part_file, [*self._rows.columns, *columns.names], suffix=self._output.suffix) as write:
            for part in parts:
                for row in _joined(part, rows, columns):
                    failed += row[columns.error] is not None
                    write(row)
        self._refuse_changed_table()
        durable.replace(part_file, self._output)
        total = sum(part.rows for part in parts)
        return Counts(total=total, completed=total - failed, failed=failed)


def _starts(lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """Yield the first line of each part. The caller takes the others."""
    while (first := next(lines, None)) is not None:
        yield first


def _fill(write: Callable[[bytes], object], line: bytes, lines: Iterator[tuple[int, bytes]]) -> int:
    """Write lines until the part is full or no line is left, and return their number."""
    count, size = 1, len(line)
    write(line)
    while count < _MAX_PART_LINES and size < _MAX_PART_BYTES and (following := next(lines, None)) is not None:
        write(following[1])
        count, size = count + 1, size + len(following[1])
    return count


def _joined(part: Part, rows: Iterator[Row], columns: AnswerColumns) -> Iterator[Row]:
    """Yield the rows of a part in order, each with its answer."""
    outcomes = dict(read_outcomes(part.files.output.path, part.files.errors.path))
    for number, row in enumerate(islice(rows, part.rows), part.first):
        yield row | columns.values(outcomes.get(row_id(number)))
