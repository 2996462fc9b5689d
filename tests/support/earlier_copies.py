"""Brings a database back to an earlier state, as the loss of its last commits does."""

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

_TABLES = ("batches", "shards", "lanes", "segments", "line_errors", "samples", "ledger")


def copy_of(database: Path) -> sqlite3.Connection:
    """Return a copy of an SQLite database in memory."""
    copy = sqlite3.connect(":memory:", check_same_thread=False)
    with closing(sqlite3.connect(database)) as connection:
        connection.backup(copy)
    return copy


def bring_back(copy: sqlite3.Connection, database: Path) -> None:
    """Overwrite an SQLite database, which may be open, with a copy."""
    with closing(sqlite3.connect(database)) as connection:
        copy.backup(connection)


async def remember_rows(
    execute: Callable[..., Awaitable[Any]], fetch: Callable[..., Awaitable[Any]]
) -> Callable[[], Awaitable[None]]:
    """Copy the rows of a PostgreSQL database, and return a function that brings them back."""
    await execute("CREATE TABLE earlier_organizations AS TABLE organizations")
    for table in _TABLES:
        await execute(f"CREATE TABLE earlier_{table} AS TABLE {table}")
    floor = await fetch("SELECT last_value FROM lane_floor")

    async def go_back() -> None:
        for table in _TABLES:
            await execute(f"DELETE FROM {table}")
            await execute(f"INSERT INTO {table} OVERRIDING SYSTEM VALUE TABLE earlier_{table}")
        await execute(
            "UPDATE organizations SET balance = earlier.balance, credits = earlier.credits "
            "FROM earlier_organizations AS earlier WHERE earlier.id = organizations.id"
        )
        await execute(f"SELECT setval('lane_floor', {floor})")

    return go_back
