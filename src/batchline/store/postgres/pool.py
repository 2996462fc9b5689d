"""Connects to PostgreSQL, and lends connections for one transaction each."""

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Protocol

import asyncpg  # type: ignore[import-untyped]

from batchline.domain.errors import StoreDown

CONNECT_TIMEOUT_SECONDS = 15.0
"""A server that is only slow accepts a connection within this time. A server that has stopped refuses at once, and only
one whose network is cut takes all of this time."""
_CACHED_STATEMENTS = 512


class PostgresConnection(Protocol):
    """The part of asyncpg's connection that is used here."""

    async def execute(self, query: str, *args: Any) -> str: ...

    async def fetch(self, query: str, *args: Any) -> list[Any]: ...

    async def fetchval(self, query: str, *args: Any) -> Any: ...

    def is_closed(self) -> bool: ...

    def is_in_transaction(self) -> bool: ...

    def terminate(self) -> None: ...


CONNECTION_ERRORS = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)
"""Everything that the driver, the server or the network can raise."""


async def connect(
    url: str, *, pooled: bool = True, timeout_seconds: float = CONNECT_TIMEOUT_SECONDS, **arguments: Any
) -> PostgresConnection:
    """Open one connection. Raise StoreDown.

    ``pooled`` says that a pooler may run every transaction on another server connection, which knows none of the
    statements that were prepared before; so none are kept. ``arguments`` are asyncpg's own.
    """
    try:
        connection: PostgresConnection = await asyncpg.connect(
            url,
            timeout=timeout_seconds,
            statement_cache_size=0 if pooled else _CACHED_STATEMENTS,
            max_cached_statement_lifetime=0,
            **arguments,
        )
    except (*CONNECTION_ERRORS, ValueError) as error:
        raise StoreDown(f"no connection: {_explain(error, timeout_seconds)}") from error
    return connection


def _explain(error: Exception, timeout_seconds: float) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"the server did not answer within {timeout_seconds:g} s"
    return str(error) or type(error).__name__


class ConnectionPool:
    """Up to ``size`` connections. Each is opened when it is first needed and kept until it fails or the pool closes."""

    def __init__(self, pool: Any, *, close_timeout_seconds: float) -> None:
        self._pool, self._close_timeout_seconds = pool, close_timeout_seconds

    @classmethod
    async def open(
        cls, url: str, *, pooled: bool, size: int, connect_timeout_seconds: float = CONNECT_TIMEOUT_SECONDS
    ) -> "ConnectionPool":
        """Create a pool without connecting yet; a server that is down is reported by the first ``acquire``."""
        pool = await asyncpg.create_pool(
            url,
            connect=partial(connect, pooled=pooled, timeout_seconds=connect_timeout_seconds),
            reset=_keep_state,
            min_size=0,
            max_size=size,
            max_queries=math.inf,
            max_inactive_connection_lifetime=0,
        )
        return cls(pool, close_timeout_seconds=connect_timeout_seconds)

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[PostgresConnection]:
        """Lend a connection. Raise StoreDown if none can be opened.

        The connection returns to the pool only if it is open and outside of a transaction, else it is terminated.
        """
        connection = await self._pool.acquire()
        try:
            yield connection
        except Exception:
            raise
        except BaseException:
            # The task was cancelled while a statement ran, and the reply to that statement is still to come.
            terminate(connection)
            raise
        finally:
            if is_open(connection) and connection.is_in_transaction():
                terminate(connection)
            await self._pool.release(connection)

    async def close(self) -> None:
        """Close every connection; terminate those that do not close in time."""
        with suppress(*CONNECTION_ERRORS):
            async with asyncio.timeout(self._close_timeout_seconds):
                await self._pool.close()


def is_open(connection: PostgresConnection) -> bool:
    """Return whether a connection is open; one that was terminated while it was lent is not."""
    try:
        return not connection.is_closed()
    except asyncpg.InterfaceError:
        return False


def terminate(connection: PostgresConnection) -> None:
    """Close a connection at once, without waiting for the server; a pool replaces it when it needs one."""
    with suppress(asyncpg.InterfaceError):
        connection.terminate()


async def _keep_state(_connection: PostgresConnection) -> None:
    """Reset nothing, which saves a round trip: transactions use only SET LOCAL, so no state outlives them."""
