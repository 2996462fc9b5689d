"""Leases shards and reads their lines.

Everything that this process holds is also in the store, as a lease under its name: nothing is held only in memory.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from batchline.domain.bitmap import unsettled
from batchline.domain.errors import Damaged, ObjectMissing, ObjectsDown, StoreDown
from batchline.domain.lines import lines_of
from batchline.domain.records import Lane, LeasedBatch, Shard
from batchline.domain.states import Stop
from batchline.pipeline.budget import Budgets
from batchline.pipeline.damage import DamageLog
from batchline.pipeline.job import HeldBatch, HeldShard, Job
from batchline.ports import Claim, Objects, ShardStore, StoreClock

log = logging.getLogger(__name__)

_MAX_READ_BYTES = 1024 * 1024
"""The most bytes of several shards that are read at once. Each read waits for the event loop twice, which may take
longer than all lines of a shard, and asks a bucket once."""


class Claims:
    """The shards that this process holds, by batch."""

    def __init__(
        self,
        *,
        store: ShardStore,
        objects: Objects,
        budgets: Budgets,
        clock: StoreClock,
        owner: str,
        lease_seconds: float,
        damage_log: DamageLog,
    ) -> None:
        self._store, self._objects, self._budgets, self._clock = store, objects, budgets, clock
        self._damage_log = damage_log
        self._owner, self._lease_seconds = owner, lease_seconds
        self._claiming = False
        self._stops: dict[str, Stop] = {}
        self.batches: dict[str, HeldBatch] = {}

    @property
    def shards(self) -> list[HeldShard]:
        return [shard for batch in self.batches.values() for shard in batch.shards.values()]

    async def claim(self, *, lines: int, bytes: int, without: Sequence[Lane] = ()) -> list[Job]:
        """Lease more shards and return their open lines as jobs, but none of the lanes in ``without``.

        A shard that must run alone is claimed only if nothing else is held, and nothing is claimed until it has ended.
        """
        held = self.shards
        if any(shard.alone for shard in held):
            return []
        self._claiming = True
        read_at = self._budgets.sequence
        try:
            claim = await self._store.claim(
                owner=self._owner,
                lease=self._lease_seconds,
                lines=lines,
                bytes=bytes,
                alone=not held,
                without=without,
                at=int(self._clock.due()),
            )
            for leased in claim.batches:
                self._budgets.of(leased.organization_id).update_balance(leased.funds, read_at=read_at)
            await self.refresh_days({leased.project_id: leased.daily_budget for leased in claim.batches})
            return await self._load_all(claim)
        finally:
            self._claiming = False
            self._stops.clear()

    async def refresh_days(self, day_limits: Mapping[str, int | None]) -> None:
        """Read what is left of the budgets that projects have for each day."""
        await self._budgets.refresh_days(self._store, day_limits, at=int(self._clock.now()))

    def note_stop(self, batch_id: str, stop: Stop) -> HeldBatch | None:
        """Return a stopped batch if it is held.

        The stop is also noted for a claim in progress, which may be about to hold the batch.
        """
        if self._claiming:
            self._stops[batch_id] = stop
        return self.batches.get(batch_id)

    async def renew(self) -> list[HeldShard]:
        """Renew all leases; forget and return the shards that are lost.

        A lease in the store that is not held here is a stray: a claim or a release failed half-way. It is released,
        except during a claim, because that may be about to hold it.
        """
        before = self.shards
        kept = await self._store.renew_shards(owner=self._owner, lease=self._lease_seconds)
        # A shard that is not held any more has ended during the renewal, and is not lost.
        lost = [shard for shard in before if shard.key not in kept and shard.is_held]
        for shard in lost:
            shard.lost = True
            self.forget(shard)
        if not self._claiming:
            await self._release_keys(kept - {shard.key for shard in (*before, *self.shards)})
        return lost

    async def find_lost(self, batch: HeldBatch) -> list[HeldShard]:
        """Compare the shards that are held of a batch with the store; forget and return those that are lost.

        A shard is lost if another process holds it, or if its bitmap is not the one that was seen here last: then the
        database has gone back to an earlier state. Call this only while nothing of the batch is being recorded.
        """
        before = list(batch.shards.values())
        stored = await self._store.held_shards(batch.id, owner=self._owner)
        found = {(shard.batch_id, shard.n, shard.epoch): shard for shard in stored}
        lost = [shard for shard in before if shard.is_held and not shard.matches(found.get(shard.key))]
        for shard in lost:
            shard.lost = True
            self.forget(shard)
        await self._release_keys(shard.key for shard in lost if shard.key in found)
        return lost

    async def release(self, shards: list[HeldShard]) -> None:
        """Forget shards and end their leases, so that any worker can claim them."""
        keys = {shard.key for shard in shards}
        for shard in shards:
            self.forget(shard)
        await self._release_keys(keys)

    def forget(self, shard: HeldShard) -> None:
        """Remove a shard from those that are held. Its lease in the store does not change."""
        if shard.is_held:
            del shard.batch.shards[shard.n]
        if not shard.batch.shards and self.batches.get(shard.batch.id) is shard.batch:
            del self.batches[shard.batch.id]

    async def _release_keys(self, keys: Iterable[tuple[str, int, int]]) -> None:
        """End leases. One that cannot be ended now is a stray that the next renewal finds."""
        by_batch: dict[str, list[tuple[int, int]]] = {}
        for batch_id, n, epoch in sorted(keys):
            by_batch.setdefault(batch_id, []).append((n, epoch))
        for batch_id, shards in by_batch.items():
            await self._store.release(batch_id, owner=self._owner, shards=shards)

    async def _load_all(self, claim: Claim) -> list[Job]:
        leased = {batch.id: batch for batch in claim.batches}
        jobs: list[Job] = []
        for shards in _adjacent(claim.shards):
            jobs += await self._load(shards, [self._hold(shard, leased[shard.batch_id]) for shard in shards])
        return jobs

    async def _load(self, shards: list[Shard], held: list[HeldShard]) -> list[Job]:
        """Return the open lines of shards that follow each other in their work file. Give back what cannot be read."""
        first, last, work_key = shards[0], shards[-1], held[0].batch.work_key
        try:
            data = await self._objects.read(work_key, first.offset, last.offset + last.length - first.offset)
        except ObjectsDown as error:
            for shard, each in zip(shards, held, strict=True):
                log.warning(
                    "failed to read the lines of a shard, releasing it",
                    extra={"batch": shard.batch_id, "shard": shard.n, "reason": str(error)},
                )
                self.forget(each)
                await self._try_to_release(shard)
            return []
        except ObjectMissing:
            data = b""
        jobs: list[Job] = []
        for shard, each in zip(shards, held, strict=True):
            start = shard.offset - first.offset
            try:
                jobs += self._open_lines(shard, each, data[start : start + shard.length])
            except Damaged:
                self._damage_log.report("shard", batch=shard.batch_id, key=work_key, offset=shard.offset)
                self.forget(each)
                await self._try_to_close(shard)
        return jobs

    async def _try_to_release(self, shard: Shard) -> None:
        """End a lease. If that fails, the next renewal finds a stray."""
        with suppress(StoreDown):
            await self._store.release(shard.batch_id, owner=self._owner, shards=[(shard.n, shard.epoch)])

    async def _try_to_close(self, shard: Shard) -> None:
        """Close a shard whose lines cannot be read. If that fails, the next renewal finds a stray."""
        with suppress(StoreDown):
            await self._store.close_shard(shard.batch_id, shard.n, epoch=shard.epoch, owner=self._owner)

    def _hold(self, shard: Shard, leased: LeasedBatch) -> HeldShard:
        batch = self.batches.get(leased.id)
        if batch is None:
            budget = self._budgets.of_batch(leased.organization_id, leased.project_id, cost_left=leased.cost_left)
            batch = self.batches[leased.id] = HeldBatch(leased, budget=budget)
        if (before := batch.shards.get(shard.n)) is not None:
            # The shard was leased to this process again, so its jobs under the former epoch no longer count.
            before.lost = True
        held = batch.shards[shard.n] = HeldShard(shard, batch)
        return held

    def _open_lines(self, shard: Shard, held: HeldShard, data: bytes) -> list[Job]:
        """Return the open lines of a shard as jobs. Raise Damaged."""
        batch = held.batch
        lines = lines_of(shard, data)
        batch.stop = batch.stop or self._stops.get(batch.id)
        open_positions = set(unsettled(shard.settled, shard.lines))
        jobs = [
            Job(line, position=position, shard=held)
            for position, line in enumerate(lines)
            if position in open_positions
        ]
        batch.pending_lines += len(jobs)
        return jobs


def _adjacent(shards: Sequence[Shard]) -> list[list[Shard]]:
    """Return shards in groups that are read at once, because each follows the one before in the same work file."""
    groups: list[list[Shard]] = []
    for shard in shards:
        last = groups[-1][-1] if groups else None
        follows = (
            last is not None
            and (shard.batch_id, shard.offset) == (last.batch_id, last.offset + last.length)
            and shard.offset + shard.length - groups[-1][0].offset <= _MAX_READ_BYTES
        )
        if follows:
            groups[-1].append(shard)
        else:
            groups.append([shard])
    return groups
