"""Runs a background step again and again, also after it has failed."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from batchline.domain.errors import LeaseLost, ObjectsDown, StoreDown, WrongIdentity
from batchline.ports import Clock

log = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0
"""The shortest time between a step that failed and the next try, even if the task is woken."""


class PeriodicTask:
    """Runs ``step`` every ``every`` seconds, and at once after ``wake``.

    A step that returns True has more to do, and runs again at once.
    """

    def __init__(self, name: str, step: Callable[[], Awaitable[bool]], *, every: float, clock: Clock) -> None:
        self._name, self._step, self._every, self._clock = name, step, every, clock
        self._woken = asyncio.Event()

    def wake(self) -> None:
        """Run the next step now."""
        self._woken.set()

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            self._woken.clear()
            if await self._run_once():
                continue
            try:
                async with asyncio.timeout(self._every):
                    await self._woken.wait()
            except TimeoutError:
                continue

    async def _run_once(self) -> bool:
        try:
            return await self._step()
        except (StoreDown, ObjectsDown, LeaseLost, WrongIdentity) as error:
            log.warning("background task interrupted, retrying", extra={"task": self._name, "reason": repr(error)})
        except Exception:
            log.exception("background task failed, retrying", extra={"task": self._name})
        await self._clock.sleep(min(self._every, _RETRY_SECONDS))
        return False
