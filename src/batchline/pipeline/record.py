"""Record outcomes: first their bytes as a segment, durably; then, in one fenced transaction, that they count.

Outcomes gather per batch and are flushed at 256 lines, 1 MiB, a second after the first, or at once when nothing of
the batch is left to wait for.
"""

import asyncio
import logging
from collections.abc import Callable
from itertools import count

from msgspec import Struct

from batchline.domain.errors import LeaseLost, ObjectsDown, StoreDown
from batchline.domain.progress import count_errors
from batchline.domain.records import Charge, Segment, ShardProgress
from batchline.domain.usage import total
from batchline.pipeline.claim import Claims, HeldBatch, HeldShard, Job
from batchline.ports import Clock, Objects, Work
from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_LINES = 256
_BYTES = 1024 * 1024
_SECONDS = 1.0
_INLINE_BYTES = 64 * 1024
_MOST_SEGMENT_BYTES = 8 * 1024 * 1024
_RETRY_SECONDS = 1.0


class _Entry(Struct, frozen=True):
    shard: HeldShard
    position: int
    line: bytes
    charge: Charge | None
    """What the line's answer cost; None for a line that failed."""


class _Buffer:
    def __init__(self, batch: HeldBatch, *, since: float) -> None:
        self.batch = batch
        self.since = since
        self.entries: list[_Entry] = []
        self.bytes = 0

    def due_in(self, now: float) -> float:
        if self.batch.unanswered == 0 or len(self.entries) >= _LINES or self.bytes >= _BYTES:
            return 0.0
        return self.since + _SECONDS - now


class Recorder:
    def __init__(
        self,
        *,
        work: Work,
        objects: Objects,
        claims: Claims,
        clock: Clock,
        owner: str,
        max_held_bytes: int,
        metrics: Metrics,
        recorded: Callable[[], None],
        shard_done: Callable[[], None],
    ) -> None:
        self._work, self._objects, self._claims, self._clock = work, objects, claims, clock
        self._owner, self._max_held_bytes = owner, max_held_bytes
        self._metrics = metrics
        self._recorded, self._shard_done = recorded, shard_done
        self._buffers: dict[str, _Buffer] = {}
        self._names = count(1)
        self._held_bytes = 0
        self._stuck = False
        self._closing = False
        self._changed = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether lines must wait: too much is held, or the disk takes nothing at the moment."""
        return self._stuck or self._held_bytes >= self._max_held_bytes

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def holds(self, batch: HeldBatch) -> bool:
        return batch.id in self._buffers

    def add(self, job: Job, line: bytes, *, charge: Charge | None) -> None:
        buffer = self._buffers.get(job.batch.id)
        if buffer is None:
            buffer = self._buffers[job.batch.id] = _Buffer(job.batch, since=self._clock.steady())
            self._changed.set()
        buffer.entries.append(_Entry(job.shard, job.position, line, charge))
        buffer.bytes += len(line)
        self._held_bytes += len(line)
        job.batch.budget.owe(0 if charge is None else charge.cost)
        if job.batch.unanswered == 0 or len(buffer.entries) >= _LINES or buffer.bytes >= _BYTES:
            self._changed.set()

    def look_again(self) -> None:
        """Something may be due earlier than it was."""
        self._changed.set()

    async def run(self) -> None:
        while True:
            self._changed.clear()
            now = self._clock.steady()
            waits = {batch_id: buffer.due_in(now) for batch_id, buffer in self._buffers.items()}
            due = [batch_id for batch_id, wait in waits.items() if wait <= 0]
            if due or self._closing:
                await self._flush(due if not self._closing else list(waits))
                if self._closing and not self._buffers:
                    return
                continue
            try:
                async with asyncio.timeout(min(waits.values(), default=None)):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def close(self) -> None:
        """Let ``run`` record what is left and end."""
        self._closing = True
        self._changed.set()

    async def _flush(self, batch_ids: list[str]) -> None:
        """Several batches share one wait for the disk, since the store groups commits."""
        async with asyncio.TaskGroup() as group:
            for batch_id in batch_ids:
                group.create_task(self._flush_batch(self._buffers[batch_id]))
        self._recorded()

    async def _flush_batch(self, buffer: _Buffer) -> None:
        taken = _first_bytes(buffer.entries)
        started = self._clock.steady()
        entries = await self._record_held(buffer.batch, taken)
        buffer.batch.budget.forgive(_cost(taken) - _cost(entries))
        for shard, bits in _bits_by_shard(entries).items():
            shard.settled |= bits
            if _all_settled(shard):
                self._claims.forget(shard)
                self._shard_done()
        self._drop_recorded(buffer, taken)
        self._metrics.flush_seconds.observe(self._clock.steady() - started)

    def _drop_recorded(self, buffer: _Buffer, taken: list[_Entry]) -> None:
        """What came in while the segment was written stays for the next one."""
        size = sum(len(entry.line) for entry in taken)
        self._held_bytes -= size
        buffer.bytes -= size
        buffer.entries = buffer.entries[len(taken) :]
        buffer.since = self._clock.steady()
        if not buffer.entries:
            del self._buffers[buffer.batch.id]

    async def _record_held(self, batch: HeldBatch, entries: list[_Entry]) -> list[_Entry]:
        """Record those entries whose shards are still ours, however long the disk takes to come back."""
        while held := [entry for entry in entries if not entry.shard.lost]:
            try:
                await self._write_segment(batch, held)
            except LeaseLost:
                await self._find_lost_shards()
            except (StoreDown, ObjectsDown) as error:
                await self._wait_for_disk(error)
            else:
                self._stuck = False
                return held
        self._stuck = False
        return []

    async def _find_lost_shards(self) -> None:
        try:
            await self._claims.renew()
        except StoreDown as error:
            await self._wait_for_disk(error)

    async def _wait_for_disk(self, error: Exception) -> None:
        if not self._stuck:
            log.error(
                "answers cannot be recorded; they are kept and no more are asked for", extra={"reason": str(error)}
            )
        self._stuck = True
        await self._clock.sleep(_RETRY_SECONDS)

    async def _write_segment(self, batch: HeldBatch, entries: list[_Entry]) -> None:
        output = b"".join(entry.line for entry in entries if entry.charge is not None)
        errors = b"".join(entry.line for entry in entries if entry.charge is None)
        data, key = output + errors, None
        if len(data) >= _INLINE_BYTES:
            key = f"segments/{batch.id}/{self._owner}-{next(self._names)}"
            await self._objects.put(key, data)
        segment = Segment(
            output_bytes=len(output),
            error_bytes=len(errors),
            object_key=key,
            data=data if key is None else None,
        )
        with batch.budget.recording():
            left = await self._work.record(
                batch.id,
                progress=_progress(entries),
                segment=segment,
                errors=count_errors(entry.line for entry in entries if entry.charge is None),
                charges=[entry.charge for entry in entries if entry.charge is not None],
                at=int(self._clock.now()),
            )
        batch.budget.paid(_cost(entries), left=left)
        failed = sum(entry.charge is None for entry in entries)
        self._metrics.lines.labels("failed").inc(failed)
        self._metrics.lines.labels("succeeded").inc(len(entries) - failed)
        self._metrics.segments.inc()
        self._metrics.segment_bytes.inc(len(data))


def _first_bytes(entries: list[_Entry]) -> list[_Entry]:
    """As many entries as one segment takes; after an outage there may be many more."""
    size = 0
    for n, entry in enumerate(entries):
        size += len(entry.line)
        if size >= _MOST_SEGMENT_BYTES:
            return entries[: n + 1]
    return list(entries)


def _bits_by_shard(entries: list[_Entry]) -> dict[HeldShard, int]:
    bits: dict[HeldShard, int] = {}
    for entry in entries:
        bits[entry.shard] = bits.get(entry.shard, 0) | 1 << entry.position
    return bits


def _all_settled(shard: HeldShard) -> bool:
    return shard.settled == (1 << shard.lines) - 1


def _progress(entries: list[_Entry]) -> list[ShardProgress]:
    progress = []
    for shard, bits in _bits_by_shard(entries).items():
        own = [entry for entry in entries if entry.shard is shard]
        charges = [entry.charge for entry in own if entry.charge is not None]
        settled = shard.settled | bits
        progress.append(
            ShardProgress(
                n=shard.n,
                epoch=shard.epoch,
                settled=settled.to_bytes((shard.lines + 7) // 8, "little"),
                completed=len(charges),
                failed=len(own) - len(charges),
                usage=total([charge.usage for charge in charges]),
                done=settled == (1 << shard.lines) - 1,
            )
        )
    return progress


def _cost(entries: list[_Entry]) -> int:
    return sum(entry.charge.cost for entry in entries if entry.charge is not None)
