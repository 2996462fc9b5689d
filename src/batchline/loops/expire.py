"""Stop batches whose window is over."""

import logging
from collections.abc import Callable

from batchline.domain.states import Stop
from batchline.ports import Clock, Work

log = logging.getLogger(__name__)


class Expire:
    def __init__(self, *, work: Work, clock: Clock, stopped: Callable[[str, Stop], None]) -> None:
        self._work, self._clock, self._stopped = work, clock, stopped

    async def step(self) -> bool:
        for batch_id in await self._work.expire(at=int(self._clock.now())):
            log.warning("batch expired", extra={"batch": batch_id})
            self._stopped(batch_id, Stop.EXPIRED)
        return False
