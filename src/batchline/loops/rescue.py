"""Takes over what a dead process held: its shards, and the batches it was validating."""

import logging
from collections.abc import Callable, Sequence

from batchline.domain.wire import encode_errors
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
        lease_seconds: float,
        live_owners: Callable[[], Sequence[str]],
        on_work_available: Callable[[], None],
    ) -> None:
        self._store, self._clock = store, clock
        self._owner, self._lease_seconds = owner, lease_seconds
        self._live_owners, self._on_work_available = live_owners, on_work_available

    async def step(self) -> bool:
        """Take over from every process that has died since the last step."""
        await self._store.watch_leases(owner=self._owner, lease=self._lease_seconds)
        rescued = await self._store.rescue(live_owners=self._live_owners)
        interrupted = await self._store.fail_interrupted(
            owner=self._owner,
            errors=encode_errors([INTERRUPTED]),
            answer=refusal(INTERRUPTED),
            at=int(self._clock.now()),
        )
        if rescued or interrupted:
            log.warning("took over from a dead process", extra={"shards": rescued, "validating": interrupted})
            self._on_work_available()
        return False
