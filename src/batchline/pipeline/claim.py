"""Lease shards and read their lines: what this process holds, and nothing of it only in memory."""

import logging
from collections.abc import Iterable

from batchline.domain.bitmap import unsettled
from batchline.domain.errors import ObjectMissing, ObjectsDown
from batchline.domain.lines import Line, decode_lines
from batchline.domain.outcomes import Setback
from batchline.domain.records import LeasedBatch, Shard
from batchline.domain.states import Stop
from batchline.ports import Claim, Clock, Objects, Work

log = logging.getLogger(__name__)


class HeldBatch:
    """A batch of which this process holds shards."""

    def __init__(self, leased: LeasedBatch) -> None:
        self.id = leased.id
        self.project_id = leased.project_id
        self.endpoint = leased.endpoint
        self.expires_at = leased.expires_at
        self.work_key = leased.work_key
        self.key_revoked = leased.key_revoked
        self.stop: Stop | None = None
        self.shards: dict[int, HeldShard] = {}
        self.unanswered = 0
        """Jobs of this batch that have no outcome yet and may still get one here."""


class HeldShard:
    def __init__(self, shard: Shard, batch: HeldBatch) -> None:
        self.batch = batch
        self.n = shard.n
        self.epoch = shard.epoch
        self.lines = shard.lines
        self.bytes = shard.length
        self.settled = int.from_bytes(shard.settled, "little")
        self.struck = bool(shard.strikes)
        self.lost = False

    @property
    def key(self) -> tuple[str, int, int]:
        return self.batch.id, self.n, self.epoch


class Job:
    """One line on its way through this process."""

    __slots__ = ("attempts", "batch", "last", "line", "position", "shard", "suspect", "throttles")

    def __init__(self, line: Line, *, position: int, shard: HeldShard) -> None:
        self.line = line
        self.position = position
        self.shard = shard
        self.batch = shard.batch
        self.attempts = 0
        self.throttles = 0
        self.last: Setback | None = None
        self.suspect = False


class Claims:
    def __init__(self, *, work: Work, objects: Objects, clock: Clock, owner: str, lease_seconds: float) -> None:
        self._work, self._objects, self._clock = work, objects, clock
        self._owner, self._lease = owner, lease_seconds
        self._claiming = False
        self._stops: dict[str, Stop] = {}
        self.batches: dict[str, HeldBatch] = {}

    @property
    def shards(self) -> list[HeldShard]:
        return [shard for batch in self.batches.values() for shard in batch.shards.values()]

    async def claim(self, *, lines: int, bytes: int) -> list[Job]:
        """More work, ready to run. A struck shard is held by itself until it is over."""
        held = self.shards
        if any(shard.struck for shard in held):
            return []
        self._claiming = True
        try:
            claim = await self._work.claim(
                owner=self._owner,
                lease=self._lease,
                lines=lines,
                bytes=bytes,
                alone=not held,
                at=int(self._clock.now()),
            )
            return await self._load_all(claim)
        finally:
            self._claiming = False
            self._stops.clear()

    def hear_stop(self, batch_id: str, stop: Stop) -> HeldBatch | None:
        """The batch that was stopped, if it is held. A claim under way may be about to hold it."""
        if self._claiming:
            self._stops[batch_id] = stop
        return self.batches.get(batch_id)

    async def renew(self) -> list[HeldShard]:
        """Prolong what is held; what turns out to be lost is dropped and returned."""
        before = self.shards
        kept = await self._work.renew_shards(owner=self._owner, lease=self._lease)
        lost = [shard for shard in before if shard.key not in kept and not shard.lost]
        for shard in lost:
            shard.lost = True
            self.forget(shard)
        if not self._claiming:
            await self._release_keys(kept - {shard.key for shard in (*before, *self.shards)})
        return lost

    async def release(self, shards: list[HeldShard]) -> None:
        keys = {shard.key for shard in shards}
        for shard in shards:
            self.forget(shard)
        await self._release_keys(keys)

    def forget(self, shard: HeldShard) -> None:
        if shard.batch.shards.get(shard.n) is shard:
            del shard.batch.shards[shard.n]
        if not shard.batch.shards and self.batches.get(shard.batch.id) is shard.batch:
            del self.batches[shard.batch.id]

    async def _release_keys(self, keys: Iterable[tuple[str, int, int]]) -> None:
        """Hand leases back. One that cannot be handed back now is a stray that the next renewal finds."""
        by_batch: dict[str, list[tuple[int, int]]] = {}
        for batch_id, n, epoch in sorted(keys):
            by_batch.setdefault(batch_id, []).append((n, epoch))
        for batch_id, shards in by_batch.items():
            await self._work.release(batch_id, shards=shards)

    async def _load_all(self, claim: Claim) -> list[Job]:
        leased = {batch.id: batch for batch in claim.batches}
        jobs: list[Job] = []
        for at, shard in enumerate(claim.shards):
            try:
                jobs += await self._load(shard, leased[shard.batch_id])
            except (ObjectsDown, ObjectMissing) as error:
                log.warning("lines cannot be read", extra={"batch": shard.batch_id, "reason": repr(error)})
                await self._release_keys((left.batch_id, left.n, left.epoch) for left in claim.shards[at:])
                break
        return jobs

    async def _load(self, shard: Shard, leased: LeasedBatch) -> list[Job]:
        data = await self._objects.read(leased.work_key, shard.offset, shard.length)
        batch = self.batches.setdefault(leased.id, HeldBatch(leased))
        batch.stop = batch.stop or self._stops.get(leased.id)
        held = batch.shards[shard.n] = HeldShard(shard, batch)
        open_positions = set(unsettled(shard.settled, shard.lines))
        jobs = [
            Job(line, position=position, shard=held)
            for position, line in enumerate(decode_lines(data))
            if position in open_positions
        ]
        batch.unanswered += len(jobs)
        return jobs
