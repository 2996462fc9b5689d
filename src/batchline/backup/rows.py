"""Finds the objects that the rows of a database need, and prepares the database of a backup to be restored."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from batchline.backup.manifest import TransferError
from batchline.domain.errors import StoreDown
from batchline.objects.keys import components
from batchline.store.sql import load_queries
from batchline.store.sqlite.database import migrate

_PACKAGE = "batchline.backup"
_QUERIES = load_queries(_PACKAGE)
_BUSY_TIMEOUT_SECONDS = 30.0


class Marks(NamedTuple):
    """The last file and segment that were looked at."""

    file: int = 0
    segment: int = 0


@contextmanager
def opened(database: Path) -> Iterator[sqlite3.Connection]:
    """Open a database; the caller begins and ends its transactions."""
    with closing(sqlite3.connect(database, isolation_level=None, timeout=_BUSY_TIMEOUT_SECONDS)) as connection:
        connection.row_factory = sqlite3.Row
        yield connection


def select(connection: sqlite3.Connection, name: str, **params: Any) -> sqlite3.Cursor:
    """Run a query of ``queries.sql``."""
    return connection.execute(_QUERIES[name], params)


def needed_since(connection: sqlite3.Connection, marks: Marks) -> tuple[list[str], Marks]:
    """Return the keys of the objects that the service needs, and new marks. The caller has begun a transaction.

    All active batches are looked at each time, but only those files and segments that were added after the marks.
    """
    found = [
        row["object_key"]
        for name in ("file_objects", "work_objects", "segment_objects")
        for row in select(connection, name, **marks._asdict())
    ]
    return found, Marks(*select(connection, "marks").fetchone())


def prepare_rows(database: Path) -> None:
    """Migrate a backup's database to this version, and remove its leases and its identity. Raise TransferError.

    A database that would run statements of its own is refused before anything is changed in it.
    """
    try:
        _require_plain_tables(database)
        migrate(database)
        with opened(database) as connection:
            connection.executescript(f"BEGIN; {files(_PACKAGE).joinpath('prepare_rows.sql').read_text()} COMMIT;")
            _require_keys(connection)
    except (sqlite3.Error, StoreDown) as error:
        raise TransferError(f"The database in the backup cannot be used: {error}") from error
    except UnicodeDecodeError as error:
        # SQLite quotes the schema in its message, whatever its bytes are.
        raise TransferError("The database in the backup cannot be used: its schema cannot be read") from error


def _require_plain_tables(database: Path) -> None:
    """Raise TransferError if the database has a trigger, a view or a virtual table. batchline never creates one."""
    with opened(database) as connection:
        connection.execute("PRAGMA trusted_schema = OFF")
        found = select(connection, "foreign_schema").fetchone()
    if found is not None:
        raise TransferError(
            f"The database in the backup has a {found['type']} named {str(found['name'])[:100]!r}, which batchline "
            "never creates: it could change rows by itself. Nothing was restored."
        )


def _require_keys(connection: sqlite3.Connection) -> None:
    """Raise TransferError if a row names an object by something that is no key, which could lead to another place."""
    for (key,) in select(connection, "all_keys"):
        try:
            is_key = len(components(key)) > 1
        except (ValueError, TypeError, AttributeError):
            is_key = False
        if not is_key:
            raise TransferError(
                f"The database in the backup names an object {str(key)[:100]!r}, which is not a key. "
                "Nothing was restored."
            )
