"""Find what a dead process left behind: its shards, and batches it was validating."""

import logging
from collections.abc import Callable, Sequence

from batchline.domain.records import errors_document
from batchline.pipeline.enqueue import INTERRUPTED, refusal
from batchline.ports import Clock, Work

log = logging.getLogger(__name__)


class Rescue:
    """``alive`` tells who holds leases rightly, as far as this process knows."""

    def __init__(
        self, *, work: Work, clock: Clock, owner: str, alive: Callable[[], Sequence[str]], opened: Callable[[], None]
    ) -> None:
        self._work, self._clock, self._owner = work, clock, owner
        self._alive, self._opened = alive, opened

    async def step(self) -> bool:
        rescued = await self._work.rescue(alive=self._alive)
        interrupted = await self._work.interrupt(
            owner=self._owner,
            errors=errors_document([INTERRUPTED]),
            answer=refusal(INTERRUPTED),
            at=int(self._clock.now()),
        )
        if rescued or interrupted:
            log.warning("took over from a dead process", extra={"shards": rescued, "validating": interrupted})
            self._opened()
        return False
