"""Cancels a batch: lines in flight finish and count, and lines that never ran end as ``batch_cancelled``."""

import logging
from collections.abc import Callable

from batchline.domain.errors import BatchNotFound, Conflict
from batchline.domain.records import Batch
from batchline.domain.states import BatchStatus, Stop
from batchline.pipeline.batch_ends import BatchEnds
from batchline.ports import Batches, Clock

log = logging.getLogger(__name__)
_NOT_CANCELLABLE = frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED})


class Cancellation:
    """Cancels batches. ``on_batch_stopped`` is called for each one, before the client gets its response."""

    def __init__(
        self,
        *,
        batches: Batches,
        clock: Clock,
        batch_ends: BatchEnds,
        on_batch_stopped: Callable[[str, Stop], None],
    ) -> None:
        self._batches = batches
        self._clock = clock
        self._batch_ends = batch_ends
        self._on_batch_stopped = on_batch_stopped

    async def cancel(self, project_id: str, batch_id: str) -> Batch:
        """Cancel a batch that still runs. Raises BatchNotFound, or Conflict if the batch has ended in another way."""
        found = await self._batches.cancel_batch(project_id, batch_id, at=int(self._clock.now()))
        if found is None:
            raise BatchNotFound(batch_id)
        batch, has_ended = found
        if has_ended:
            log.info(
                "batch cancelled during its validation, no line of it runs",
                extra={"batch": batch.id, "project_id": batch.project_id},
            )
            self._batch_ends.on_batch_ended(batch, batch.status)
        if batch.status in _NOT_CANCELLABLE:
            raise Conflict(f"Cannot cancel a batch with status '{batch.status}'.", code="batch_not_cancellable")
        # The worker of this process is notified before the client, so that no attempt starts after the response.
        self._on_batch_stopped(batch_id, Stop.CANCELLED)
        return batch
