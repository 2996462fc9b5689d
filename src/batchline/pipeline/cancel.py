"""Stop a batch: what is in flight finishes and counts, what never ran becomes ``batch_cancelled``."""

from collections.abc import Callable

from batchline.domain.errors import BatchNotFound, Conflict
from batchline.domain.records import Batch
from batchline.domain.states import BatchStatus, Stop
from batchline.ports import Batches, Clock

_TOO_LATE = frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED})


class Cancellation:
    def __init__(self, *, batches: Batches, clock: Clock, on_batch_stopped: Callable[[str, Stop], None]) -> None:
        self._batches = batches
        self._clock = clock
        self._on_batch_stopped = on_batch_stopped

    async def cancel(self, project_id: str, batch_id: str) -> Batch:
        batch = await self._batches.cancel_batch(project_id, batch_id, at=int(self._clock.now()))
        if batch is None:
            raise BatchNotFound(batch_id)
        if batch.status in _TOO_LATE:
            raise Conflict(
                f"Batch {batch_id} is {batch.status} and can no longer be cancelled", code="batch_not_cancellable"
            )
        # The worker beside us hears it before the client does, so that no attempt starts after the answer.
        self._on_batch_stopped(batch_id, Stop.CANCELLED)
        return batch
