"""Stop batches whose window is over."""

import logging
from collections.abc import Callable

from batchline.domain.states import Stop
from batchline.ports import Clock, ShardStore

log = logging.getLogger(__name__)


class Expire:
    def __init__(self, *, store: ShardStore, clock: Clock, on_batch_stopped: Callable[[str, Stop], None]) -> None:
        self._store, self._clock, self._on_batch_stopped = store, clock, on_batch_stopped

    async def step(self) -> bool:
        for batch_id in await self._store.expire(at=int(self._clock.now())):
            log.warning("batch expired", extra={"batch": batch_id})
            self._on_batch_stopped(batch_id, Stop.EXPIRED)
        return False
