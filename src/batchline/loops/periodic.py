"""The beat of a background loop: do a step again and again, sooner when nudged, through every outage."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from batchline.domain.errors import LeaseLost, ObjectsDown, StoreDown
from batchline.ports import Clock

log = logging.getLogger(__name__)

_BREATH_SECONDS = 1.0
"""Between a step that failed and a nudge to try it again."""


class PeriodicTask:
    """Runs ``step`` every so many seconds, and at once after ``wake``. A step that says True has more to do."""

    def __init__(self, name: str, step: Callable[[], Awaitable[bool]], *, every: float, clock: Clock) -> None:
        self._name, self._step, self._every, self._clock = name, step, every, clock
        self._woken = asyncio.Event()

    def wake(self) -> None:
        self._woken.set()

    async def run(self) -> None:
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
        except (StoreDown, ObjectsDown, LeaseLost) as error:
            log.warning("a background step must wait", extra={"step": self._name, "reason": repr(error)})
        except Exception:
            log.exception("a background step failed", extra={"step": self._name})
        await self._clock.sleep(min(self._every, _BREATH_SECONDS))
        return False
