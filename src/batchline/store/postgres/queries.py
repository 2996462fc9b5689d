"""Named queries in the form that PostgreSQL's protocol takes them, and the values that go in and come out."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from batchline.store.sql import Row, Statement, load_queries

_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)")
_COMMENT = re.compile(r"^--.*\n", re.MULTILINE)
_ESCAPE = "\x10"
"""PostgreSQL's text holds every character but NUL, which JSON may well hold."""


class Query(NamedTuple):
    sql: str
    names: tuple[str, ...]

    def values(self, statement: Statement) -> list[Any]:
        """In the order of their numbers; of many, an array of each."""
        if statement.many is None:
            return [_storable(statement.params[name]) for name in self.names]
        return [[_storable(params[name]) for params in statement.many] for name in self.names]


def load_numbered(package: str) -> dict[str, Query]:
    return {name: _numbered(sql) for name, sql in load_queries(package).items()}


def readable(records: Sequence[Mapping[str, Any]]) -> list[Row]:
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
