"""Checks the version of the PostgreSQL schema and brings it up to date."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.resources import files

from batchline.domain.errors import StoreDown
from batchline.ports import Clock
from batchline.store.postgres.pool import CONNECTION_ERRORS, PostgresConnection, connect

PACKAGE = "batchline.store.postgres"
_LOCK = "SELECT pg_advisory_xact_lock(1651794792, 0)"
_VERSION = "SELECT version FROM schema_version"
_CREATE_VERSION_TABLE = (
    "CREATE TABLE schema_version (version integer NOT NULL); INSERT INTO schema_version (version) VALUES (0)"
)
_CHECK_TIMEOUT_SECONDS = 20.0
_WAIT_SECONDS = 2.0
"""The time between two checks whether another process has migrated the schema."""
_OLDER = "its tables are missing or of an older version; run batchline migrate"


async def migrate(url: str) -> None:
    """Bring the schema up to date. Raise StoreDown.

    If several processes start at once, one of them migrates and the others wait.
    """
    async with _transaction(url) as connection:
        await connection.execute(_LOCK)
        done, scripts = await _version(connection), _scripts()
        _refuse_newer(done)
        if done is None:
            await connection.execute(_CREATE_VERSION_TABLE)
        for script in scripts[done or 0 :]:
            await connection.execute(script)
        await connection.execute("UPDATE schema_version SET version = $1", len(scripts))


async def check_version(url: str) -> None:
    """Raise StoreDown unless the schema has the version that this program expects."""
    version = await _read_version(url)
    _refuse_newer(version)
    if version != expected_version():
        raise StoreDown(_OLDER)


async def await_version(url: str, *, clock: Clock, on_wait: Callable[[str], None]) -> None:
    """Wait until another process has brought the schema up to date. Raise StoreDown if it is of a newer version.

    ``on_wait`` gets the reason before each wait: older tables, or a server that does not answer.
    """
    while True:
        try:
            version = await _read_version(url)
        except StoreDown as error:
            reason = str(error)
        else:
            _refuse_newer(version)
            if version == expected_version():
                return
            reason = _OLDER
        on_wait(reason)
        await clock.sleep(_WAIT_SECONDS)


async def _read_version(url: str) -> int | None:
    try:
        async with asyncio.timeout(_CHECK_TIMEOUT_SECONDS), _transaction(url) as connection:
            return await _version(connection)
    except TimeoutError as error:
        raise StoreDown("it does not answer") from error


def expected_version() -> int:
    """Return the version of the schema that this program is written for."""
    return len(_scripts())


def _refuse_newer(version: int | None) -> None:
    if version is not None and version > expected_version():
        raise StoreDown("it was made by a newer version of batchline; use that one")


async def _version(connection: PostgresConnection) -> int | None:
    if await connection.fetchval("SELECT to_regclass('schema_version')::text") is None:
        return None
    version: int = await connection.fetchval(_VERSION)
    return version


def _scripts() -> list[str]:
    found = sorted(files(PACKAGE).joinpath("migrations").iterdir(), key=lambda script: script.name)
    return [script.read_text() for script in found]


@asynccontextmanager
async def _transaction(url: str) -> AsyncIterator[PostgresConnection]:
    connection = await connect(url)
    try:
        await connection.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
        yield connection
        await connection.execute("COMMIT")
    except CONNECTION_ERRORS as error:
        raise StoreDown(str(error) or type(error).__name__) from error
    finally:
        connection.terminate()
