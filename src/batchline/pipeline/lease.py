"""Renews a lease in the background while its holder works."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from batchline.domain.errors import StoreDown
from batchline.ports import Clock

log = logging.getLogger(__name__)


@asynccontextmanager
async def renewing(renew: Callable[[], Awaitable[None]], *, every: float, clock: Clock) -> AsyncIterator[None]:
    """Call ``renew`` every ``every`` seconds while the body runs.

    If ``renew`` raises LeaseLost because another process holds the lease, the body is cancelled and LeaseLost is raised
    in its place. If the store is unavailable, the body goes on, since the store may be back before the lease expires.
    """

    async def keep_renewing() -> None:
        while True:
            await clock.sleep(every)
            try:
                await renew()
            except StoreDown as error:
                log.warning("failed to renew a lease, retrying", extra={"reason": str(error), "retry_in": every})

    try:
        async with asyncio.TaskGroup() as group:
            renewal = group.create_task(keep_renewing())
            yield
            renewal.cancel()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
