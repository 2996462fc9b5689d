"""Writes tables: CSV and TSV, else JSONL with one object per row."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from msgspec.json import encode as encode_json

from batchline.pipeline.rows.table import DELIMITERS
from batchline.pipeline.rows.template import as_text


class RowWriter(Protocol):
    """Writes rows to a file."""

    def __call__(self, row: Mapping[str, Any]) -> None:
        """Write a row."""


@contextmanager
def row_writer(path: Path, columns: Sequence[str], *, suffix: str) -> Iterator[RowWriter]:
    """Yield a function that writes rows as the suffix says, CSV or TSV, else JSONL."""
    delimiter = DELIMITERS.get(suffix.lower())
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
