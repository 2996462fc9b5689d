"""Reads and writes tables: CSV, TSV, JSONL with one object per row, and Parquet if its library is installed."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import click
from msgspec import DecodeError
from msgspec.json import Decoder
from msgspec.json import encode as encode_json

from batchline.cli.run.rows.template import as_text

Row = dict[str, Any]

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_PARQUET = ".parquet"
_JSONL = ".jsonl"
SUFFIXES = (*_DELIMITERS, _JSONL, _PARQUET)
_MAX_CELL_CHARACTERS = 1024 * 1024
"""As large as a line of a batch may be."""
_BATCH_ROWS = 1000
_object = Decoder(dict[str, Any])


class Rows(Protocol):
    """The rows of a table, which can be read more than once."""

    columns: list[str]

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows in order."""


def open_table(path: Path) -> Rows:
    """Return the rows of a file, by its suffix. Raise UsageError if it cannot be read as a table."""
    suffix = path.suffix.lower()
    if suffix in _DELIMITERS:
        return _DelimitedRows(path, _DELIMITERS[suffix])
    if suffix == _PARQUET:
        return _ParquetRows(path)
    if suffix == _JSONL:
        return _ObjectRows(path)
    raise click.UsageError(f"{path.name}: --prompt needs a table: {', '.join(SUFFIXES)}")


class _DelimitedRows:
    """The rows of a CSV or TSV file. The first line names the columns."""

    def __init__(self, path: Path, delimiter: str) -> None:
        self._path, self._delimiter = path, delimiter
        _, self.columns = next(self._lines(), (0, list[str]()))
        if not self.columns:
            raise click.UsageError(f"{path.name} is empty")
        if len(set(self.columns)) < len(self.columns):
            raise click.UsageError(f"{path.name}: two columns have the same name")

    def __iter__(self) -> Iterator[Row]:
        for number, values in islice(self._lines(), 1, None):
            yield self._row(values, number)

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the lines that are not empty, each with its number. Raise UsageError."""
        csv.field_size_limit(_MAX_CELL_CHARACTERS)
        with self._path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=self._delimiter, strict=True)
            try:
                for values in reader:
                    if values:
                        yield reader.line_num, values
            except (csv.Error, UnicodeDecodeError) as error:
                raise self._broken(reader.line_num, error) from None

    def _row(self, values: list[str], line: int) -> Row:
        if len(values) != len(self.columns):
            raise click.UsageError(
                f"{self._path.name}, line {line}: {len(values)} values for {len(self.columns)} columns"
            )
        return dict(zip(self.columns, values, strict=True))

    def _broken(self, line: int, error: Exception) -> click.UsageError:
        what = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else "has quotes that do not match"
        return click.UsageError(f"{self._path.name}, near line {line}: the text {what}")


class _ObjectRows:
    """The rows of a JSONL file: one object per line. The columns are those of the first object."""

    def __init__(self, path: Path) -> None:
        self._path = path
        first = next(iter(self), None)
        if first is None:
            raise click.UsageError(f"{path.name} is empty")
        self.columns = list(first)

    def __iter__(self) -> Iterator[Row]:
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    yield _object.decode(line)
                except (DecodeError, UnicodeDecodeError):
                    raise click.UsageError(f"{self._path.name}, line {number}: expected a JSON object") from None


class _ParquetRows:
    """The rows of a Parquet file, read in groups."""

    def __init__(self, path: Path) -> None:
        try:
            library = import_module("pyarrow.parquet")  # an extra, which may not be installed
        except ImportError:
            raise click.UsageError(
                f"{path.name}: reading Parquet needs a library; install it with: pip install 'batchline[parquet]'"
            ) from None
        try:
            self._file = library.ParquetFile(path)
        except ValueError:  # the base of the library's error for what it cannot read
            raise click.UsageError(f"{path.name} is not a Parquet file") from None
        self.columns: list[str] = list(self._file.schema_arrow.names)

    def __iter__(self) -> Iterator[Row]:
        for group in self._file.iter_batches(batch_size=_BATCH_ROWS):
            yield from group.to_pylist()


class RowWriter(Protocol):
    """Writes rows to a file."""

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Write a row."""


@contextmanager
def row_writer(path: Path, columns: Sequence[str], *, suffix: str) -> Iterator[RowWriter]:
    """Yield a function that writes rows as the suffix says, CSV or TSV, else JSONL."""
    delimiter = _DELIMITERS.get(suffix.lower())
    if delimiter is None:
        with path.open("wb") as file:
            yield lambda row: _write_object(file, row)
        return
    with path.open("w", encoding="utf-8", newline="") as text:
        writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
        writer.writerow(columns)
        yield lambda row: writer.writerow([as_text(row.get(column)) for column in columns])


def _write_object(file: BinaryIO, row: Mapping[str, Any]) -> None:
    file.write(encode_json(dict(row)) + b"\n")
