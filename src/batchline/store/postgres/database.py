"""PostgreSQL as a Database, for many machines at once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import asyncpg  # type: ignore[import-untyped]

from batchline.domain.errors import StoreDown
from batchline.ports import Clock
from batchline.store.postgres.migrate import PACKAGE, check_version
from batchline.store.postgres.pool import TROUBLE, Connections, PostgresConnection, connect
from batchline.store.postgres.queries import load_numbered, readable
from batchline.store.sql import Result, Script, Statement

T = TypeVar("T")

# A machine that vanishes in the middle of a transaction must not keep its locks until the network gives it up.
# Tables here are empty one minute and large the next, faster than statistics follow: statements are planned once, and
# always by an index where there is one.
_SETTINGS = (
    "SET LOCAL statement_timeout = 10000; SET LOCAL idle_in_transaction_session_timeout = 10000; "
    "SET LOCAL plan_cache_mode = force_generic_plan; SET LOCAL enable_seqscan = off; "
    "SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off"
)
_BEGIN_READ = f"BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY; {_SETTINGS}"
_BEGIN_WRITE = f"BEGIN ISOLATION LEVEL READ COMMITTED, READ WRITE; {_SETTINGS}"
_TRANSACTION = "SELECT pg_current_xact_id_if_assigned()::text"
_TRANSACTION_SECONDS = 20.0
"""For a whole transaction: longer than any takes, and the end of one on a network that is cut."""

_ATTEMPTS = 10
_CLASHES = (asyncpg.SerializationError, asyncpg.DeadlockDetectedError, asyncpg.InvalidCachedStatementError)
"""The database gave up this transaction for the sake of another, or its tables have just changed: once more."""


class PostgresDatabase:
    """Reads are of one snapshot. Writes are READ COMMITTED: each statement sees what was committed before it, so a
    script locks what it decides by, and all scripts lock in one order: leased shards, batches, projects, lanes, open
    shards, organizations."""

    def __init__(self, url: str, connections: Connections, *, clock: Clock) -> None:
        self._url, self._connections, self._clock = url, connections, clock
        self._queries = load_numbered(PACKAGE)

    @classmethod
    async def open(cls, url: str, *, pooled: bool, size: int, clock: Clock) -> "PostgresDatabase":
        """With up to ``size`` connections; ``pooled`` when they go through a pooler in transaction mode. Raises
        StoreDown, also when the schema is not this version's."""
        await check_version(url)
        return cls(url, Connections(url, pooled=pooled, size=size), clock=clock)

    async def close(self) -> None:
        await self._connections.close()

    async def read(self, script: Callable[[], Script[T]]) -> T:
        return await self._again_after_clashes(lambda: self._read_once(script))

    async def write(self, script: Callable[[], Script[T]]) -> T:
        return await self._again_after_clashes(lambda: self._write_once(script))

    async def _again_after_clashes(self, attempt: Callable[[], Awaitable[T]]) -> T:
        for _ in range(_ATTEMPTS):
            try:
                return await attempt()
            except (*_CLASHES, _NotBegun) as error:
                clash = error
            except asyncpg.IntegrityConstraintViolationError:
                raise
            except TROUBLE as error:
                raise StoreDown(_reason(error)) from error
        raise StoreDown(_reason(clash)) from clash

    async def _read_once(self, script: Callable[[], Script[T]]) -> T:
        async with self._connections.lend_job() as connection, _bounded(connection):
            await _begin(connection, _BEGIN_READ)
            value = await self._run(connection, script())
            await connection.execute("COMMIT")
        return value

    async def _write_once(self, script: Callable[[], Script[T]]) -> T:
        async with self._connections.lend_job() as connection:
            async with _bounded(connection):
                await _begin(connection, _BEGIN_WRITE)
                value = await self._run(connection, script())
                transaction = await connection.fetchval(_TRANSACTION)
            pending_lines = await _commit(connection)
        if pending_lines is None or transaction is None:
            return value
        if not await was_committed(self._url, transaction, clock=self._clock):
            raise StoreDown(_reason(pending_lines)) from pending_lines
        return value

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


class _NotBegun(Exception):
    """The connection was gone before anything was asked of it, as all are after the server restarted."""


@asynccontextmanager
async def _bounded(connection: PostgresConnection) -> AsyncIterator[None]:
    """What fails is rolled back; what hangs, or is cut off, leaves nothing but a connection that is closed."""
    try:
        async with asyncio.timeout(_TRANSACTION_SECONDS):
            yield
    except TimeoutError:
        connection.terminate()
        raise
    except Exception:
        if not connection.is_closed():
            await _roll_back(connection)
        raise


async def _roll_back(connection: PostgresConnection) -> None:
    try:
        async with asyncio.timeout(_TRANSACTION_SECONDS):
            await connection.execute("ROLLBACK")
    except TROUBLE:
        connection.terminate()


async def _begin(connection: PostgresConnection, begin: str) -> None:
    try:
        await connection.execute(begin)
    except TROUBLE as error:
        if connection.is_closed():
            raise _NotBegun(_reason(error)) from error
        raise


async def _commit(connection: PostgresConnection) -> Exception | None:
    """Why nobody said that it happened, if nobody did."""
    try:
        async with asyncio.timeout(_TRANSACTION_SECONDS):
            await connection.execute("COMMIT")
    except TROUBLE as error:
        connection.terminate()
        return error
    return None


def _reason(error: Exception) -> str:
    return str(error) or type(error).__name__


_STATUS = "SELECT pg_xact_status($1::text::xid8) AS status, pg_is_in_recovery() AS standby"
_STATUS_PAUSE_SECONDS = 0.5
_STATUS_SECONDS = 10.0


async def was_committed(url: str, transaction: str, *, clock: Clock) -> bool:
    """Asks until the database tells, however long it is away. Where the COMMIT was lost on the way, the server waits
    for it as long as it lets any transaction be idle."""
    while True:
        with suppress(StoreDown, *TROUBLE):
            async with asyncio.timeout(_STATUS_SECONDS):
                status = await _ask(url, transaction)
            if status != "in progress":
                return status == "committed"
        await clock.sleep(_STATUS_PAUSE_SECONDS)


async def _ask(url: str, transaction: str) -> str:
    connection: Any = await connect(url)
    try:
        async with connection.transaction():
            row = await connection.fetchrow(_STATUS, transaction)
    except asyncpg.InvalidParameterValueError:
        # Another server took over, which never heard of the transaction.
        return "aborted"
    finally:
        connection.terminate()
    return "in progress" if row["standby"] else row["status"]
