"""Connections that are lent for one transaction each, and no state of their own in between."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

import asyncpg  # type: ignore[import-untyped]

from batchline.domain.errors import StoreDown

_CONNECT_SECONDS = 5.0
_KEPT_STATEMENTS = 512


class PostgresConnection(Protocol):
    """What is used of asyncpg's."""

    async def execute(self, query: str, *args: Any) -> str: ...

    async def fetch(self, query: str, *args: Any) -> list[Any]: ...

    async def fetchval(self, query: str, *args: Any) -> Any: ...

    def is_closed(self) -> bool: ...

    def is_in_transaction(self) -> bool: ...

    def terminate(self) -> None: ...

    async def close(self, *, timeout: float | None = None) -> None: ...


TROUBLE = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)
"""Whatever a driver, a server or a network can raise."""


async def connect(url: str, *, pooled: bool = True) -> PostgresConnection:
    """``pooled``: some pooler may give every transaction another server, which knows none of our statements."""
    kept = 0 if pooled else _KEPT_STATEMENTS
    try:
        connection: PostgresConnection = await asyncpg.connect(
            url, timeout=_CONNECT_SECONDS, statement_cache_size=kept, max_cached_statement_lifetime=0
        )
    except (*TROUBLE, ValueError) as error:
        raise StoreDown(f"no connection: {error or type(error).__name__}") from error
    return connection


class Connections:
    def __init__(self, url: str, *, pooled: bool, size: int) -> None:
        self._url, self._pooled = url, pooled
        self._free = asyncio.Semaphore(size)
        self._idle: list[PostgresConnection] = []

    @asynccontextmanager
    async def lend_job(self) -> AsyncIterator[PostgresConnection]:
        """One that works, as far as can be known. It is taken back only outside of a transaction."""
        async with self._free:
            connection = self._known() or await connect(self._url, pooled=self._pooled)
            try:
                yield connection
            except Exception:
                raise
            except BaseException:
                # Cut off in the middle of a statement, whose answer is still to come.
                connection.terminate()
                raise
            finally:
                if connection.is_closed() or connection.is_in_transaction():
                    connection.terminate()
                else:
                    self._idle.append(connection)

    async def close(self) -> None:
        while self._idle:
            try:
                await self._idle.pop().close(timeout=_CONNECT_SECONDS)
            except TROUBLE:
                continue

    def _known(self) -> PostgresConnection | None:
        """The one used last, so that those not needed stay idle; a server that restarted has closed them all."""
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_closed():
                return connection
        return None
