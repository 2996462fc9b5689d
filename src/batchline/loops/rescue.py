"""Takes over from dead processes: their shards, and the batches that they were validating."""

import logging
from collections.abc import Callable, Sequence

from batchline.domain.wire import encode_errors
from batchline.pipeline.batch_ends import BatchEnds
from batchline.pipeline.create import INTERRUPTED, refusal
from batchline.ports import Clock, ShardStore

log = logging.getLogger(__name__)


class Rescue:
    """Makes the shards of dead processes claimable, and ends the batches whose validation they did not finish.

    ``live_owners`` returns the owners whose leases are valid, as far as this process knows. ``on_work_available`` is
    called if anything was taken over.
    """

    def __init__(
        self,
        *,
        store: ShardStore,
        clock: Clock,
        owner: str,
        live_owners: Callable[[], Sequence[str]],
        batch_ends: BatchEnds,
        on_work_available: Callable[[], None],
    ) -> None:
        self._store, self._clock, self._batch_ends = store, clock, batch_ends
        self._owner, self._live_owners, self._on_work_available = owner, live_owners, on_work_available

    async def step(self) -> bool:
        """Take over from every process that has died since the last step."""
        rescued = await self._store.rescue(live_owners=self._live_owners)
        interrupted = await self._store.fail_interrupted(
            owner=self._owner,
            errors=encode_errors([INTERRUPTED]),
            answer=refusal(INTERRUPTED),
            at=int(self._clock.now()),
        )
        for batch in interrupted:
            log.warning(
                "validation interrupted by the death of its process, batch failed",
                extra={"batch": batch.id, "project_id": batch.project_id},
            )
            self._batch_ends.on_batch_ended(batch, batch.status)
        if rescued or interrupted:
            log.warning("took over from a dead process", extra={"shards": rescued, "validating": len(interrupted)})
            self._on_work_available()
        return False
