"""Stops batches whose completion window has ended."""

import logging
from collections.abc import Callable

from batchline.domain.states import Stop
from batchline.ports import ShardStore

log = logging.getLogger(__name__)


class Expire:
    """Marks batches as expired. ``on_batch_stopped`` is called for each one."""

    def __init__(self, *, store: ShardStore, on_batch_stopped: Callable[[str, Stop], None]) -> None:
        self._store, self._on_batch_stopped = store, on_batch_stopped

    async def step(self) -> bool:
        """Stop every batch whose window has ended since the last step."""
        for batch_id in await self._store.expire():
            log.warning("batch expired, its remaining lines will not run", extra={"batch": batch_id})
            self._on_batch_stopped(batch_id, Stop.EXPIRED)
        return False
