"""Reads tables: CSV, TSV, JSONL with one object per row, and Parquet if its library is installed."""

import csv
from collections.abc import Iterator, Sized
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from msgspec import DecodeError, Raw
from msgspec.json import Decoder

from batchline.domain.input_lines import skip_byte_order_mark
from batchline.domain.surrogates import without_surrogates
from batchline.pipeline.rows.fault import RowsFault

Row = dict[str, Any]

DELIMITERS = {".csv": ",", ".tsv": "\t"}
"""The character between two values, by the suffix of a file."""
_PARQUET = ".parquet"
_JSONL = ".jsonl"
SUFFIXES = (*DELIMITERS, _JSONL, _PARQUET)
_MAX_CELL_CHARACTERS = 1024 * 1024
"""A line of a batch may be as large as this."""
_BATCH_ROWS = 1000
_NOT_UTF8 = "the text is not UTF-8"
_object = Decoder(dict[str, Any])
_raw_object = Decoder(dict[str, Raw])


class Rows(Protocol):
    """The rows of a table, which can be read more than once."""

    columns: list[str]

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows in order. Raise RowsFault."""


def open_table(path: Path) -> Rows:
    """Return the rows of a file, by its suffix. Raise RowsFault if it cannot be read as a table."""
    try:
        return _open(path)
    except OSError as error:
        raise RowsFault(f"{path.name} cannot be read: {error.strerror or error}") from None


def _open(path: Path) -> Rows:
    suffix = path.suffix.lower()
    if suffix in DELIMITERS:
        return DelimitedRows(path, name=path.name)
    if suffix == _PARQUET:
        return _ParquetRows(path)
    if suffix == _JSONL:
        return _ObjectRows(path)
    raise RowsFault(f"{path.name}: a template needs a table: {', '.join(SUFFIXES)}")


class DelimitedRows:
    """The rows of a CSV or TSV file, as the suffix of its name says. The first line names the columns."""

    def __init__(self, path: Path, *, name: str) -> None:
        self._path, self._name, self._delimiter = path, name, DELIMITERS[Path(name).suffix.lower()]
        _, self.columns = next(self._lines(), (0, list[str]()))
        if not self.columns:
            raise RowsFault(f"{name} is empty")
        _refuse_equal_names(self.columns, table=name)

    def __iter__(self) -> Iterator[Row]:
        for row in self.with_faults():
            if isinstance(row, RowsFault):
                raise row
            yield row

    def with_faults(self) -> Iterator[Row | RowsFault]:
        """Yield the rows in order, and a fault in place of each that cannot be used.

        Nothing follows a fault after which it is unknown where the next row begins.
        """
        try:
            for number, values in islice(self._lines(), 1, None):
                yield self._row(values, number)
        except RowsFault as fault:
            yield fault

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the lines that are not empty, each with its number. Raise RowsFault."""
        csv.field_size_limit(_MAX_CELL_CHARACTERS)
        with self._path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=self._delimiter, strict=True)
            try:
                for values in reader:
                    if values:
                        yield reader.line_num, values
            except csv.Error as error:
                place = f"{self._name}, near line {reader.line_num}"
                raise RowsFault(_problem(error), place=place, line=reader.line_num) from None
            except UnicodeDecodeError:
                # The file is decoded in blocks, ahead of the reader.
                line = _undecodable_line(self._path)
                raise RowsFault(_NOT_UTF8, place=f"{self._name}, line {line}", line=line) from None

    def _row(self, values: list[str], line: int) -> Row | RowsFault:
        if len(values) != len(self.columns):
            text = f"{_count(values, 'value')} for {_count(self.columns, 'column')}"
            return RowsFault(text, place=f"{self._name}, line {line}", line=line)
        return dict(zip(self.columns, values, strict=True))


def _count(things: Sized, noun: str) -> str:
    return f"{len(things)} {noun if len(things) == 1 else f'{noun}s'}"


def _undecodable_line(path: Path) -> int:
    """Return the number of the first line that is not UTF-8."""
    with path.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        return next(
            number for number, line in enumerate(file, 1) if not _is_utf8(line.encode(errors="surrogateescape"))
        )


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def _problem(error: csv.Error) -> str:
    if "field limit" in str(error):
        return f"a value has more than {_MAX_CELL_CHARACTERS:,} characters, or the quote at its end is missing"
    return "the text has quotes that do not match"


class _ObjectRows:
    """The rows of a JSONL file: one object per line. An object may lack some of the columns, which are those of all."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.columns = list(dict.fromkeys(column for row in self for column in row))
        if not self.columns:
            raise RowsFault(f"{path.name} is empty")

    def __iter__(self) -> Iterator[Row]:
        with self._path.open("rb") as file:
            skip_byte_order_mark(file)
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    yield _object.decode(line)
                except (DecodeError, UnicodeDecodeError, RecursionError):
                    raise RowsFault(f"{self._path.name}, line {number}: {_object_problem(line)}") from None


def _object_problem(line: bytes) -> str:
    """Return why a line cannot be read as an object with values that Python has."""
    if not _is_utf8(line):
        return _NOT_UTF8
    readable = without_surrogates(line)
    try:
        _raw_object.decode(readable)
    except (DecodeError, RecursionError):
        return "expected a JSON object"
    if readable != line:
        return r"a text has half of a surrogate pair, such as \ud83d, which is not a character"
    return "a number is too large"


class _ParquetRows:
    """The rows of a Parquet file, read in groups."""

    def __init__(self, path: Path) -> None:
        try:
            library = import_module("pyarrow.parquet")  # an extra, which may not be installed
            self._arrow = import_module("pyarrow")
        except ImportError:
            raise RowsFault(
                f"{path.name}: reading Parquet needs a library; install it with: pip install 'batchline[parquet]'"
            ) from None
        try:
            self._file = library.ParquetFile(path)
        except ValueError:  # the base of the library's error for what it cannot read
            raise RowsFault(f"{path.name} is not a Parquet file") from None
        self._name, self._schema = path.name, self._in_microseconds(self._file.schema_arrow)
        self.columns: list[str] = list(self._schema.names)
        _refuse_equal_names(self.columns, table=path.name)

    def __iter__(self) -> Iterator[Row]:
        try:
            for group in self._file.iter_batches(batch_size=_BATCH_ROWS):
                yield from self._arrow.Table.from_batches([group]).cast(self._schema, safe=False).to_pylist()
        # The bases of the library's errors for damaged bytes and wrong values, and the error of unknown times.
        except (OSError, ValueError, OverflowError) as error:
            raise RowsFault(f"{self._name}: the rows cannot be read: {error}") from None

    def _in_microseconds(self, schema: Any) -> Any:
        """Return a schema without nanoseconds, which a time of Python does not have, but pandas writes by default."""
        arrow = self._arrow
        return arrow.schema(
            [
                field.with_type(arrow.timestamp("us", field.type.tz))
                if arrow.types.is_timestamp(field.type) and field.type.unit == "ns"
                else field
                for field in schema
            ]
        )


def _refuse_equal_names(columns: list[str], *, table: str) -> None:
    if len(set(columns)) < len(columns):
        raise RowsFault(f"{table}: two columns have the same name")
