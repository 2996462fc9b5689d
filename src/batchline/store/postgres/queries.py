"""Turns named queries into the form of PostgreSQL's protocol, and converts the values that go in and come out."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from batchline.store.sql import Row, Statement, load_queries

_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)")
_COMMENT = re.compile(r"^--.*\n", re.MULTILINE)
_ESCAPE = "\x10"
"""Stands for NUL, the only character that PostgreSQL's text cannot hold and JSON can: NUL is stored as escape and 0,
and the escape character itself as escape and 1."""


class Query(NamedTuple):
    """A statement with numbered parameters, and their names in the order of the numbers."""

    sql: str
    names: tuple[str, ...]

    def values(self, statement: Statement) -> list[Any]:
        """Return the parameters' values in the order of their numbers; for ``many``, an array for each parameter."""
        if statement.many is None:
            return [_storable(statement.params[name]) for name in self.names]
        return [[_storable(params[name]) for params in statement.many] for name in self.names]


def load_numbered(package: str) -> dict[str, Query]:
    """Return the queries of a package by name."""
    return {name: _numbered(sql) for name, sql in load_queries(package).items()}


def readable(records: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return rows with their text as it was before it was stored."""
    return [_readable(record) if _has_escapes(record) else record for record in records]


def _numbered(sql: str) -> Query:
    sql = _COMMENT.sub("", sql).strip()
    names = tuple(dict.fromkeys(_PARAMETER.findall(sql)))
    return Query(_PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", sql), names)


def _storable(value: Any) -> Any:
    if isinstance(value, str) and ("\0" in value or _ESCAPE in value):
        return value.replace(_ESCAPE, _ESCAPE + "1").replace("\0", _ESCAPE + "0")
    return value


def _has_escapes(record: Mapping[str, Any]) -> bool:
    return any(isinstance(value, str) and _ESCAPE in value for value in record.values())


def _readable(record: Mapping[str, Any]) -> Row:
    return {
        name: value.replace(_ESCAPE + "0", "\0").replace(_ESCAPE + "1", _ESCAPE) if isinstance(value, str) else value
        for name, value in record.items()
    }
