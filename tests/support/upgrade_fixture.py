"""The data of services of earlier versions, as ``tests/support/upgrade_maker.py`` saved it."""

import asyncio
import json
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any, TypedDict

import asyncpg  # type: ignore[import-untyped]

FIXTURES = Path(__file__).parents[1] / "upgrade" / "fixtures"
_HOUR_SECONDS = 3600
_TIMES = {
    "organizations": ("created_at",),
    "projects": ("created_at",),
    "keys": ("created_at", "last_used_at", "revoked_at"),
    "ledger": ("at",),
    "files": ("created_at", "expires_at", "removed_at"),
    "batches": (
        *("created_at", "expires_at", "in_progress_at", "finalizing_at", "completed_at", "failed_at"),
        *("expired_at", "cancelling_at", "cancelled_at"),
    ),
    "shards": ("expires_at",),
    "samples": ("at",),
}
"""The columns of version 1 that hold Unix times. Leases are left as they are: those who held them are dead."""


class ExpectedBatch(TypedDict):
    """A batch: what it is called here, its number of lines, and the state it must end in."""

    name: str
    id: str
    lines: int
    ends: str


class Expected(TypedDict):
    """What every later version must make of a fixture. Batches and files are those of the project ``alpha``."""

    made_at: int
    accounts: dict[str, dict[str, str]]
    batches: list[ExpectedBatch]
    files: dict[str, dict[str, str]]
    gone: list[str]


def versions() -> list[str]:
    """Return the versions of the schema that there are fixtures of."""
    return sorted(path.name for path in FIXTURES.iterdir() if path.is_dir())


class Fixture:
    """The data of one version, on one kind of database."""

    def __init__(self, version: str, kind: str) -> None:
        self._folder = FIXTURES / version / kind
        self.expected: Expected = json.loads((self._folder / "expected.json").read_text())

    def copy_objects(self, data_dir: Path) -> None:
        shutil.copytree(self._folder / "objects", data_dir / "objects")

    def load_sqlite(self, data_dir: Path) -> Path:
        """Create the database of a data folder and return its path."""
        path = data_dir / "batchline.sqlite"
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(self._script())
        return path

    def load_postgres(self, url: str) -> None:
        """Create the tables and rows in an empty database."""
        asyncio.run(_execute(url, self._script()))

    def _script(self) -> str:
        """Return the statements that create the database, with its times moved to the present.

        They are moved by whole hours, because each hour has its own entries in the ledger.
        """
        seconds = (int(time.time()) - self.expected["made_at"]) // _HOUR_SECONDS * _HOUR_SECONDS
        moves = [
            f"UPDATE {prefix}{table} SET " + ", ".join(f"{name} = {name} + {seconds}" for name in columns) + ";"
            for prefix in ("public." if self._folder.name == "postgres" else "",)
            for table, columns in _TIMES.items()
        ]
        return (self._folder / "database.sql").read_text() + "\n".join(moves)


async def _execute(url: str, script: str) -> None:
    connection: Any = await asyncpg.connect(url)
    try:
        await connection.execute(script)
    finally:
        await connection.close()
