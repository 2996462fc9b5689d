"""What became of a transaction whose COMMIT was never answered."""

import asyncio
from contextlib import suppress
from typing import Any

import asyncpg  # type: ignore[import-untyped]

from batchline.domain.errors import StoreDown
from batchline.ports import Clock
from batchline.store.postgres.connections import TROUBLE, connect

_STATUS = "SELECT pg_xact_status($1::text::xid8) AS status, pg_is_in_recovery() AS standby"
_PAUSE_SECONDS = 0.5
_PATIENCE_SECONDS = 10.0


async def was_committed(url: str, transaction: str, *, clock: Clock) -> bool:
    """Asks until the database tells, however long it is away. Where the COMMIT was lost on the way, the server waits
    for it as long as it lets any transaction be idle."""
    while True:
        with suppress(StoreDown, *TROUBLE):
            async with asyncio.timeout(_PATIENCE_SECONDS):
                status = await _ask(url, transaction)
            if status != "in progress":
                return status == "committed"
        await clock.sleep(_PAUSE_SECONDS)


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
