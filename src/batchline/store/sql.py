"""Writes a transaction once, as a generator, and lets any database driver run it.

There are two kinds of driver. SQLite's blocks, and runs in a thread. PostgreSQL's is asynchronous, and runs on the
event loop. Written for one of them, a transaction could not run on the other. So a transaction does not call a driver.
It is a *script*: a generator that yields each statement it wants to run, and is sent the result::

    def script() -> Script[Batch | None]:
        row = yield from one("batch", project_id=project_id, id=batch_id)      # run this query, give me its row
        if row is None:
            return None                                                        # commit; the value is None
        if (yield from change("cancel_running", id=batch_id, at=at)):          # run this update, give me its row count
            yield from change("close_open_shards", batch_id=batch_id, follows=True)
        return (yield from fetch_batch(batch_id))                              # a script can run another script

    batch = await database.write(script)

Who does what:

- The *script* holds the logic: which statements, in which order, depending on which results. It names statements; it
  knows neither SQL nor a driver. ``rows``, ``one``, ``change``, ``fenced`` and their variants for many parameters each
  yield one ``Statement`` and return the useful part of its ``Result``.
- ``queries.sql`` holds the SQL, one file per dialect, with the same names in both.
- The *Database* drives the script: it begins a transaction, calls ``next(script)`` for the first statement, runs it,
  calls ``script.send(result)`` for the next one, and so on until the generator returns. Then it commits.
  ``SqliteDatabase._run`` and ``PostgresDatabase._run`` are that loop, the second one with ``await``.

What follows from it:

- The value that a script returns is the value of the transaction.
- An exception that a script raises rolls the transaction back and reaches the caller of ``write``.
- ``read`` and ``write`` take a function that makes the script, not the script itself, because a transaction that
  PostgreSQL gave up (after a deadlock, say) is run again from its start, and a generator runs only once.
  So a script has no effects but its statements.
- A script must not await. While it runs the transaction is open, and waiting for anything else would hold its locks.
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
    """One named statement, to be run for one set of parameters or for each set in ``many``."""

    name: str
    params: Mapping[str, Any]
    many: Sequence[Mapping[str, Any]] | None = None
    fetch: bool = False
    """Whether the script wants the rows; else it wants the number of changed rows."""


class Result(NamedTuple):
    """The rows that a statement returned, or the number of rows that it changed."""

    rows: list[Row]
    changed: int


Script = Generator[Statement, Result, T]
"""A transaction whose value has type T."""


class Database(Protocol):
    """Runs scripts."""

    schema_version: int
    """The version of the schema that this program is written for."""

    async def read(self, script: Callable[[], Script[T]]) -> T:
        """Run a script that changes nothing, on one snapshot. Raise StoreDown."""

    async def write(self, script: Callable[[], Script[T]]) -> T:
        """Run a script as one durable transaction. Raise StoreDown, and then nothing was committed."""


def rows(name: str, /, **params: Any) -> Script[list[Row]]:
    """Run a query and return its rows."""
    return (yield Statement(name, params, fetch=True)).rows


def one(name: str, /, **params: Any) -> Script[Row | None]:
    """Run a query and return its first row, or None if there is none."""
    found = (yield Statement(name, params, fetch=True)).rows
    return found[0] if found else None


def rows_of_many(name: str, many: Sequence[Mapping[str, Any]]) -> Script[list[Row]]:
    """Run a query for each set of parameters and return all rows."""
    return (yield Statement(name, {}, many, fetch=True)).rows if many else []


def change(name: str, /, **params: Any) -> Script[int]:
    """Run a change and return the number of changed rows."""
    return (yield Statement(name, params)).changed


def change_many(name: str, many: Sequence[Mapping[str, Any]]) -> Script[int]:
    """Run a change for each set of parameters and return the number of changed rows."""
    return (yield Statement(name, {}, many)).changed if many else 0


def fenced(name: str, /, **params: Any) -> Script[None]:
    """Run a change that must hit exactly the row that this process has leased. Raise LeaseLost."""
    if (yield Statement(name, params)).changed != 1:
        raise LeaseLost(name)


def fenced_many(name: str, many: Sequence[Mapping[str, Any]]) -> Script[None]:
    """Run a change that must hit exactly one leased row for each set of parameters. Raise LeaseLost."""
    if (yield from change_many(name, many)) != len(many):
        raise LeaseLost(name)


def load_queries(package: str) -> dict[str, str]:
    """Return the statements of a package's ``queries.sql`` by name."""
    return parse_queries(files(package).joinpath("queries.sql").read_text())


def parse_queries(text: str) -> dict[str, str]:
    """Return statements by name; each follows its ``-- name:`` line. Raise ValueError if two have the same name."""
    _, *parts = _NAME.split(text)
    queries: dict[str, str] = {}
    for name, statement in zip(parts[::2], parts[1::2], strict=True):
        if name in queries:
            raise ValueError(f"Two statements are named {name}")
        queries[name] = statement
    return queries
