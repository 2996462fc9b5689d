"""The database of a backup: which objects its rows need, and how it is made one that nobody holds anything of."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from batchline.backup.manifest import TransferError
from batchline.domain.errors import StoreDown
from batchline.ports import Clock, Threads
from batchline.store.sql import load_queries
from batchline.store.sqlite.database import SqliteDatabase

_PACKAGE = "batchline.backup"
_QUERIES = load_queries(_PACKAGE)
_BUSY_SECONDS = 30.0


class Marks(NamedTuple):
    """Up to where rows were looked at."""

    file: int = 0
    segment: int = 0


@contextmanager
def opened(database: Path) -> Iterator[sqlite3.Connection]:
    """Transactions are the caller's own."""
    with closing(sqlite3.connect(database, isolation_level=None, timeout=_BUSY_SECONDS)) as connection:
        connection.row_factory = sqlite3.Row
        yield connection


def select(connection: sqlite3.Connection, name: str, **params: Any) -> sqlite3.Cursor:
    return connection.execute(_QUERIES[name], params)


def needed_since(connection: sqlite3.Connection, marks: Marks) -> tuple[list[str], Marks]:
    """Keys of the objects that the service could not go on without, as of one snapshot of the caller's. All running
    batches are looked at each time; of files and segments only those numbered since."""
    found = [
        row["object_key"]
        for name in ("file_objects", "work_objects", "segment_objects")
        for row in select(connection, name, **marks._asdict())
    ]
    return found, Marks(*select(connection, "marks").fetchone())


def settle(database: Path, *, clock: Clock, threads: Threads) -> None:
    """Bring a backup's database up to this version, and end every lease in it."""
    try:
        SqliteDatabase(database, clock=clock, writer=threads, reader=threads).close()
        with opened(database) as connection:
            connection.executescript(f"BEGIN; {files(_PACKAGE).joinpath('settle.sql').read_text()} COMMIT;")
    except (sqlite3.Error, StoreDown) as error:
        raise TransferError(f"The database in the backup cannot be used: {error}") from error
