"""Fills prompts with columns in braces, such as ``Classify: {review}``. Two braces stand for one."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.json import decode as decode_json
from msgspec.json import encode as encode_json

from batchline.pipeline.rows.fault import RowsFault

_MAX_SHOWN_COLUMNS = 20
_PIECE = re.compile(r"(?P<text>[^{}]*)(?:(?P<braces>\{\{|\}\})|\{(?P<column>[^{}]*)\}|\Z)")
"""Text up to the next two braces, the next column in braces, or the end."""
_FORMATTING = re.compile("[!:]")
"""These characters begin a conversion or a format in the braces of Python. Here they are a part of a column's name."""
_ONLY_NAMES = (
    "write the name of a column in braces, and nothing else; {{ and }} stand for braces that are a part of the text"
)


class Template(Struct, frozen=True):
    """A text with places for the values of a row."""

    label: str
    """The option or field that gave the text, for messages."""
    parts: tuple[tuple[str, str | None], ...]
    """Pieces of text, each with the column that follows it, if one does."""

    @property
    def columns(self) -> set[str]:
        """The columns that the text names."""
        return {column for _, column in self.parts if column is not None}

    def fill(self, row: Mapping[str, Any]) -> str:
        """Return the text for a row. A column that the row lacks is an empty text."""
        return "".join(text + ("" if column is None else as_text(row.get(column))) for text, column in self.parts)

    def require_columns(self, known: Collection[str]) -> None:
        """Raise RowsFault if the table lacks a column that the text names."""
        missing = sorted(self.columns - set(known))
        if missing:
            shown = ", ".join(list(known)[:_MAX_SHOWN_COLUMNS])
            text = f"{self.label}: the table has no column {', '.join(map(repr, missing))}; it has: {shown}"
            if any(_FORMATTING.search(column) for column in missing):
                text += f"; {_ONLY_NAMES}"
            raise RowsFault(text)


def parse_template(label: str, text: str) -> Template:
    """Return the template of a text. Raise RowsFault if it is empty or cannot be read."""
    if not text.strip():
        raise RowsFault(f"{label}: the text is empty")
    parts = tuple(_parts(label, text))
    if any(column == "" for _, column in parts):
        raise RowsFault(f"{label}: {_ONLY_NAMES}")
    return Template(label, parts)


def _parts(label: str, text: str) -> Iterator[tuple[str, str | None]]:
    at = 0
    while at < len(text):
        piece = _PIECE.match(text, at)
        if piece is None:
            raise RowsFault(f"{label}: a brace has no partner; write {{{{ for one brace")
        yield piece["text"] + (piece["braces"] or "")[:1], piece["column"]
        at = piece.end()


def as_text(value: Any) -> str:
    """Return a value of a row as text: a text as it is, nothing as an empty text, anything else as JSON.

    A value that is a text in JSON, such as a date, is written without the quotes.
    """
    if value is None or isinstance(value, str):
        return value or ""
    text = encode_json(value)
    return decode_json(text, type=str) if text.startswith(b'"') else text.decode()
