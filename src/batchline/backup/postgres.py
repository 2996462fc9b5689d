"""Copies the rows of a backup into PostgreSQL, in one transaction."""

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from batchline.backup.manifest import TransferError
from batchline.backup.rows import opened, select
from batchline.domain.errors import StoreDown
from batchline.store.postgres.pool import CONNECTION_ERRORS, connect
from batchline.store.postgres.queries import Query
from batchline.store.sql import Statement

TABLES = (
    "organizations",
    "projects",
    "keys",
    "ledger",
    "metering",
    "files",
    "batches",
    "shards",
    "lanes",
    "segments",
    "line_errors",
    "result_orders",
    "samples",
    "webhooks",
    "deliveries",
)
"""The tables that are copied, each after those it refers to. The tables left out are about one database alone, or are
filled again, such as ``reuse_indexes``."""

_BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED; SET LOCAL statement_timeout = 0"
_LOCK = "LOCK TABLE organizations, files, batches, processes IN EXCLUSIVE MODE"
_HOLDS_ROWS = "SELECT EXISTS (SELECT FROM organizations) OR EXISTS (SELECT FROM files) OR EXISTS (SELECT FROM batches)"
_IS_IN_USE = "SELECT EXISTS (SELECT FROM processes WHERE lease_until >= clock_timestamp())"
_COLUMNS = (
    "SELECT column_name, data_type FROM information_schema.columns "
    "WHERE table_schema = current_schema() AND table_name = $1"
)
_NAME_DATABASE = "UPDATE identity SET database_id = coalesce(database_id, $1) RETURNING database_id"
_SET_SEQUENCE = "SELECT setval(pg_get_serial_sequence($1, $2), greatest($3, 1), $3 > 0)"

_CONVERTERS: Mapping[str, Callable[[Any], Any]] = {
    "boolean": bool,
    "timestamp with time zone": lambda seconds: datetime.fromtimestamp(seconds, UTC),
}
"""Converts SQLite's numbers for those types of PostgreSQL's columns that are not numbers."""


class PostgresRows:
    """Restores rows into an empty PostgreSQL database."""

    def __init__(self, url: str, *, pooled: bool) -> None:
        self._url, self._pooled = url, pooled

    async def require_empty(self) -> None:
        """Raise TransferError if the database holds rows or a service uses it."""
        async with self._transaction() as connection:
            await _require_empty(connection)

    async def name_database(self, _database: Path, *, database_id: str) -> str:
        """Give the PostgreSQL database an id, unless it has one already, and return its id. Raise TransferError."""
        async with self._transaction() as connection:
            name: str = await connection.fetchval(_NAME_DATABASE, database_id)
        return name

    async def insert_all(self, database: Path, *, objects_id: str) -> None:
        """Insert all rows of a backup's database and the id of its objects, or none. Raise TransferError."""
        async with self._transaction() as connection:
            await connection.execute(_LOCK)
            await _require_empty(connection)
            await connection.execute("DELETE FROM metering")
            await connection.execute("UPDATE identity SET objects_id = $1", objects_id)
            with opened(database) as rows:
                for table in TABLES:
                    await _copy(rows, table, connection)
                for name, number, last in select(rows, "numbers"):
                    await connection.execute(_SET_SEQUENCE, name, number, last or 0)

    @asynccontextmanager
    async def _transaction(self) -> AsyncIterator[Any]:
        try:
            connection = await connect(self._url, pooled=self._pooled)
            try:
                await connection.execute(_BEGIN)
                yield connection
                await connection.execute("COMMIT")
            finally:
                connection.terminate()
        except (StoreDown, *CONNECTION_ERRORS) as error:
            raise TransferError(
                f"PostgreSQL did not take the rows: {error or type(error).__name__}. The same command may be run again."
            ) from error


async def _require_empty(connection: Any) -> None:
    if await connection.fetchval(_HOLDS_ROWS):
        raise TransferError(
            "The PostgreSQL database holds organizations, files or batches already. Restore into an empty one."
        )
    if await connection.fetchval(_IS_IN_USE):
        raise TransferError(
            "A service is running on the PostgreSQL database. Stop it first: it would remove the restored objects "
            "before their rows are inserted."
        )


async def _copy(rows: sqlite3.Connection, table: str, connection: Any) -> None:
    found = select(rows, table)
    columns = tuple(column[0] for column in found.description)
    types = {row["column_name"]: row["data_type"] for row in await connection.fetch(_COLUMNS, table)}
    converters = {name: _CONVERTERS[types[name]] for name in columns if types.get(name) in _CONVERTERS}
    records = _Records(found, columns, converters)
    try:
        await connection.copy_records_to_table(table, records=records, columns=columns)
    except (TypeError, ValueError, OverflowError) as error:
        raise TransferError(f"A row of {table} in the backup has a value of another type: {error}") from error
    arrived = await connection.fetchval(f"SELECT count(*) FROM {table}")  # noqa: S608 (one of TABLES)
    if arrived != records.count:
        raise TransferError(f"Of {records.count} rows of {table} {arrived} arrived. Nothing was restored.")


class _Records:
    """Iterates over rows in the form that PostgreSQL takes, and counts them."""

    def __init__(
        self, found: sqlite3.Cursor, columns: tuple[str, ...], converters: Mapping[str, Callable[[Any], Any]]
    ) -> None:
        self._found, self._converters = found, converters
        # Text is escaped as the service escapes it.
        self._query = Query("", columns)
        self.count = 0

    def __iter__(self) -> Iterator[list[Any]]:
        for row in self._found:
            self.count += 1
            yield self._query.values(Statement("copy", self._converted(dict(row))))

    def _converted(self, row: dict[str, Any]) -> dict[str, Any]:
        for name, convert in self._converters.items():
            if row[name] is not None:
                row[name] = convert(row[name])
        return row
