"""Doing long work under a lease that must be renewed meanwhile."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from batchline.domain.errors import StoreDown
from batchline.ports import Clock

T = TypeVar("T")
log = logging.getLogger(__name__)


async def while_renewing(work: Awaitable[T], *, renew: Callable[[], Awaitable[None]], every: float, clock: Clock) -> T:
    """The value of ``work``. It is cut off with LeaseLost when ``renew`` finds that somebody else holds the lease;
    a store that does not answer may come back in time, so that alone ends nothing."""

    async def keep_renewing() -> None:
        while True:
            await clock.sleep(every)
            try:
                await renew()
            except StoreDown as error:
                log.warning("a lease could not be renewed", extra={"reason": str(error)})

    try:
        async with asyncio.TaskGroup() as group:
            renewal = group.create_task(keep_renewing())
            value = await work
            renewal.cancel()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return value
