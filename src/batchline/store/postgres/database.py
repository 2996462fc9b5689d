"""Runs scripts on PostgreSQL, for many machines at once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import asyncpg  # type: ignore[import-untyped]

from batchline.domain.errors import StoreDown
from batchline.ports import Clock
from batchline.store.postgres.migrate import PACKAGE, check_version, expected_version
from batchline.store.postgres.pool import (
    CONNECT_TIMEOUT_SECONDS,
    CONNECTION_ERRORS,
    ConnectionPool,
    PostgresConnection,
    connect,
    is_open,
    terminate,
)
from batchline.store.postgres.queries import load_numbered, readable
from batchline.store.sql import Result, Script, Statement

T = TypeVar("T")

TRANSACTION_TIMEOUT_SECONDS = 20.0
"""Longer than any transaction takes; it ends one whose network is cut."""
IDLE_TIMEOUT_SECONDS = 10.0
"""The server ends a transaction that is idle for longer, so that a machine that vanishes does not keep its locks."""

_STATEMENT_TIMEOUT_SECONDS = 10.0
_MAX_ATTEMPTS = 10
_COMMIT_POLL_INTERVAL_SECONDS = 0.5
_COMMIT_POLL_TIMEOUT_SECONDS = 10.0

_DURABLE = "SET LOCAL synchronous_commit = on"
"""A commit is on the disk before it is reported, whatever the server, the database or the role is set to. It is set in
each transaction because a pooler in transaction mode keeps nothing that is set for a session."""

_TRANSACTION_ID = "SELECT pg_current_xact_id_if_assigned()::text"
_TRANSACTION_STATUS = "SELECT pg_xact_status($1::text::xid8) AS status, pg_is_in_recovery() AS standby"

_TIME = "SELECT extract(epoch FROM clock_timestamp())::float8 AS time"

_LOWER_LANE_FLOOR = """
SELECT setval('lane_floor', least_open.virtual_time)
FROM (SELECT min(virtual_time) AS virtual_time FROM lanes WHERE open) AS least_open
WHERE least_open.virtual_time < (SELECT last_value FROM lane_floor)
"""

_RETRYABLE = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError, asyncpg.InvalidCachedStatementError)
"""The server gave up this transaction in favour of another, or the tables have just changed: run it again."""


class PostgresDatabase:
    """A database that many processes use.

    A read sees one snapshot. Writes are READ COMMITTED: each statement sees what was committed before it. So a script
    locks the rows that its decisions depend on, and all scripts lock in one order: leased shards, batches, projects,
    lanes, open and withheld shards, organizations.
    """

    def __init__(
        self,
        url: str,
        pool: ConnectionPool,
        *,
        clock: Clock,
        connect_timeout_seconds: float = CONNECT_TIMEOUT_SECONDS,
        transaction_timeout_seconds: float = TRANSACTION_TIMEOUT_SECONDS,
        idle_timeout_seconds: float = IDLE_TIMEOUT_SECONDS,
    ) -> None:
        self._url, self._pool, self._clock = url, pool, clock
        self._connect_timeout_seconds = connect_timeout_seconds
        self._transaction_timeout_seconds = transaction_timeout_seconds
        self._queries = load_numbered(PACKAGE)
        self.schema_version = expected_version()
        settings = _transaction_settings(idle_timeout_seconds)
        self._begin_read = f"BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY; {settings}"
        self._begin_write = f"BEGIN ISOLATION LEVEL READ COMMITTED, READ WRITE; {settings}; {_DURABLE}"

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        pooled: bool,
        size: int,
        clock: Clock,
        connect_timeout_seconds: float = CONNECT_TIMEOUT_SECONDS,
        transaction_timeout_seconds: float = TRANSACTION_TIMEOUT_SECONDS,
        idle_timeout_seconds: float = IDLE_TIMEOUT_SECONDS,
    ) -> "PostgresDatabase":
        """Open a database with up to ``size`` connections.

        ``pooled`` says that they go through a pooler in transaction mode. Raise StoreDown, also if the schema is not
        that of this version.
        """
        await check_version(url)
        await _lower_lane_floor(url)
        pool = await ConnectionPool.open(url, pooled=pooled, size=size, connect_timeout_seconds=connect_timeout_seconds)
        return cls(
            url,
            pool,
            clock=clock,
            connect_timeout_seconds=connect_timeout_seconds,
            transaction_timeout_seconds=transaction_timeout_seconds,
            idle_timeout_seconds=idle_timeout_seconds,
        )

    async def close(self) -> None:
        """Close every connection."""
        await self._pool.close()

    async def read(self, script: Callable[[], Script[T]]) -> T:
        """Run a script that changes nothing, on one snapshot. Raise StoreDown."""
        return await self._retry(lambda: self._read_once(script))

    async def write(self, script: Callable[[], Script[T]]) -> T:
        """Run a script as one durable transaction. Raise StoreDown, and then nothing was committed."""
        return await self._retry(lambda: self._write_once(script))

    async def time(self) -> float:
        """Return the Unix time of the database. Raise StoreDown."""
        return await self._retry(self._read_time)

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        for _ in range(_MAX_ATTEMPTS):
            try:
                return await attempt()
            except (*_RETRYABLE, _NotBegun) as error:
                last_error = error
            except asyncpg.IntegrityConstraintViolationError:
                raise
            except CONNECTION_ERRORS as error:
                raise StoreDown(_reason(error)) from error
        raise StoreDown(_reason(last_error)) from last_error

    async def _read_time(self) -> float:
        async with self._pool.acquire() as connection, self._transaction(connection, self._begin_read):
            time: float = (await connection.fetch(_TIME))[0]["time"]
            await connection.execute("COMMIT")
        return time

    async def _read_once(self, script: Callable[[], Script[T]]) -> T:
        async with self._pool.acquire() as connection, self._transaction(connection, self._begin_read):
            value = await self._run(connection, script())
            await connection.execute("COMMIT")
        return value

    async def _write_once(self, script: Callable[[], Script[T]]) -> T:
        async with self._pool.acquire() as connection:
            async with self._transaction(connection, self._begin_write):
                value = await self._run(connection, script())
                transaction_id = await connection.fetchval(_TRANSACTION_ID)
            commit_error = await self._commit(connection)
        # A transaction that changed nothing has no id, and no outcome to ask for.
        if commit_error is None or transaction_id is None:
            return value
        if not await self._was_committed(transaction_id):
            raise StoreDown(_reason(commit_error)) from commit_error
        return value

    @asynccontextmanager
    async def _transaction(self, connection: PostgresConnection, begin: str) -> AsyncIterator[None]:
        """Begin a transaction. After an error roll it back; after a timeout terminate the connection."""
        try:
            async with asyncio.timeout(self._transaction_timeout_seconds):
                await _begin(connection, begin)
                yield
        except TimeoutError:
            terminate(connection)
            raise
        except Exception:
            if is_open(connection):
                await self._roll_back(connection)
            raise

    async def _roll_back(self, connection: PostgresConnection) -> None:
        try:
            async with asyncio.timeout(self._transaction_timeout_seconds):
                await connection.execute("ROLLBACK")
        except CONNECTION_ERRORS:
            terminate(connection)

    async def _commit(self, connection: PostgresConnection) -> Exception | None:
        """Return the error if COMMIT got no reply, else None."""
        try:
            async with asyncio.timeout(self._transaction_timeout_seconds):
                await connection.execute("COMMIT")
        except CONNECTION_ERRORS as error:
            terminate(connection)
            return error
        return None

    async def _was_committed(self, transaction_id: str) -> bool:
        """Ask the server until it knows the outcome of a transaction, however long the server is unavailable.

        If the COMMIT itself was lost, the server ends the transaction after its idle timeout.
        """
        while True:
            with suppress(StoreDown, *CONNECTION_ERRORS):
                async with asyncio.timeout(_COMMIT_POLL_TIMEOUT_SECONDS):
                    status = await self._transaction_status(transaction_id)
                if status != "in progress":
                    return status == "committed"
            await self._clock.sleep(_COMMIT_POLL_INTERVAL_SECONDS)

    async def _transaction_status(self, transaction_id: str) -> str:
        connection: Any = await connect(self._url, timeout_seconds=self._connect_timeout_seconds)
        try:
            async with connection.transaction():
                row = await connection.fetchrow(_TRANSACTION_STATUS, transaction_id)
        except asyncpg.InvalidParameterValueError:
            # Another server took over, to which the transaction was never replicated.
            return "aborted"
        finally:
            connection.terminate()
        return "in progress" if row["standby"] else row["status"]

    async def _run(self, connection: PostgresConnection, script: Script[T]) -> T:
        try:
            statement = next(script)
            while True:
                statement = script.send(await self._execute(connection, statement))
        except StopIteration as stop:
            value: T = stop.value
            return value

    async def _execute(self, connection: PostgresConnection, statement: Statement) -> Result:
        query = self._queries[statement.name]
        values = query.values(statement)
        if statement.fetch:
            return Result(readable(await connection.fetch(query.sql, *values)), 0)
        tag = await connection.execute(query.sql, *values)
        return Result([], int(tag.rpartition(" ")[2]))


async def _lower_lane_floor(url: str) -> None:
    """Make the claims find every open lane again after a restore. Raise StoreDown.

    A dump of a database holds sequences as they were when they were read, which is later than its rows. So in a
    restored database the floor may be above lanes that are open.
    """
    connection = await connect(url)
    try:
        await connection.execute(_LOWER_LANE_FLOOR)
    except CONNECTION_ERRORS as error:
        raise StoreDown(_reason(error)) from error
    finally:
        connection.terminate()


class _NotBegun(Exception):
    """The connection was closed before its first statement, as all are after the server restarted."""


async def _begin(connection: PostgresConnection, begin: str) -> None:
    try:
        await connection.execute(begin)
    except CONNECTION_ERRORS as error:
        if not is_open(connection):
            raise _NotBegun(_reason(error)) from error
        raise


def _transaction_settings(idle_timeout_seconds: float) -> str:
    # Tables here are empty one minute and large the next, faster than the planner's statistics follow. So statements
    # are planned once, and always by an index if there is one.
    return (
        f"SET LOCAL statement_timeout = {_milliseconds(_STATEMENT_TIMEOUT_SECONDS)}; "
        f"SET LOCAL idle_in_transaction_session_timeout = {_milliseconds(idle_timeout_seconds)}; "
        "SET LOCAL plan_cache_mode = force_generic_plan; SET LOCAL enable_seqscan = off; "
        "SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off"
    )


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__
