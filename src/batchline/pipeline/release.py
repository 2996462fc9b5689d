"""Releases a held batch: its other lines run, and it is not held again."""

import logging
from collections.abc import Callable

from batchline.domain.errors import BatchNotFound, Conflict
from batchline.domain.records import Batch
from batchline.ports import Batches

log = logging.getLogger(__name__)


class HoldRelease:
    """Releases batches. ``on_work_available`` is called for each one: its lines can be claimed again."""

    def __init__(self, *, batches: Batches, on_work_available: Callable[[], None]) -> None:
        self._batches, self._on_work_available = batches, on_work_available

    async def release(self, project_id: str, batch_id: str) -> Batch:
        """Release a batch. Raises BatchNotFound, or Conflict if it is not held."""
        found = await self._batches.release_batch(project_id, batch_id)
        if found is None:
            raise BatchNotFound(batch_id)
        batch, released = found
        if not released:
            raise Conflict(f"Batch {batch_id} is not held", code="batch_not_held")
        log.info("batch released, its other lines run now", extra={"batch": batch_id})
        self._on_work_available()
        return batch
