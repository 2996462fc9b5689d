"""SQL by name, and transactions that know no driver.

A *script* is a generator: it yields statements and is sent their results, so the same transaction runs on a
blocking driver in a thread and on an asynchronous one. What it returns is the transaction's value; what it raises
rolls the transaction back.
"""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from importlib.resources import files
from typing import Any, NamedTuple, Protocol, TypeVar

from batchline.domain.errors import LeaseLost

T = TypeVar("T")
Row = Mapping[str, Any]
_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


class Statement(NamedTuple):
    """One statement, for one set of parameters or for each of many; ``fetch`` asks for rows, else for a count."""

    name: str
    params: Mapping[str, Any]
    many: Sequence[Mapping[str, Any]] | None = None
    fetch: bool = False


class Result(NamedTuple):
    rows: list[Row]
    changed: int


Script = Generator[Statement, Result, T]


class Database(Protocol):
    async def read(self, script: Callable[[], Script[T]]) -> T:
        """Run a script that changes nothing, on one snapshot."""

    async def write(self, script: Callable[[], Script[T]]) -> T:
        """Run a script as one durable transaction. Raises StoreDown, and then nothing happened."""


def rows(name: str, /, **params: Any) -> Script[list[Row]]:
    return (yield Statement(name, params, fetch=True)).rows


def one(name: str, /, **params: Any) -> Script[Row | None]:
    found = (yield Statement(name, params, fetch=True)).rows
    return found[0] if found else None


def rows_of_many(name: str, many: Sequence[Mapping[str, Any]]) -> Script[list[Row]]:
    """What a statement tells of each of many."""
    return (yield Statement(name, {}, many, fetch=True)).rows if many else []


def change(name: str, /, **params: Any) -> Script[int]:
    return (yield Statement(name, params)).changed


def change_many(name: str, many: Sequence[Mapping[str, Any]]) -> Script[int]:
    return (yield Statement(name, {}, many)).changed if many else 0


def fenced(name: str, /, **params: Any) -> Script[None]:
    """A change that must hit exactly the row this process holds."""
    if (yield Statement(name, params)).changed != 1:
        raise LeaseLost(name)


def fenced_many(name: str, many: Sequence[Mapping[str, Any]]) -> Script[None]:
    if (yield from change_many(name, many)) != len(many):
        raise LeaseLost(name)


def load_queries(package: str) -> dict[str, str]:
    """The statements of a dialect's ``queries.sql``, each below its ``-- name:`` line."""
    _, *parts = _NAME.split(files(package).joinpath("queries.sql").read_text())
    return dict(zip(parts[::2], parts[1::2], strict=True))
