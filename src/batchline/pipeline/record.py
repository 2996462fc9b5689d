"""Record outcomes: first their bytes as a segment, durably; then, in one fenced transaction, that they count.

Outcomes gather per batch. They are flushed a second after the first, or after 50 ms where they are 256 lines by then;
sooner when they are 1 MiB, and at once when nothing of the batch is left to wait for.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from itertools import count

from batchline.domain.errors import LeaseLost, ObjectsDown, StoreDown
from batchline.domain.records import Segment
from batchline.domain.usage import Usage
from batchline.pipeline.claim import Claims, HeldBatch, Job
from batchline.pipeline.draft import Draft
from batchline.ports import Clock, Objects, Work
from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_SECONDS = 1.0
_LINES, _SECONDS_OF_MANY = 256, 0.05
"""A flush costs as much as hundreds of lines, so that a fast upstream would have too many."""
_BYTES = 1024 * 1024
_INLINE_BYTES = 64 * 1024
_MOST_SEGMENT_BYTES = 8 * 1024 * 1024
_RETRY_SECONDS = 1.0


class _Buffer:
    """Of one batch: what was not recorded yet, in the order in which it came. The last draft takes what comes next."""

    def __init__(self, batch: HeldBatch) -> None:
        self.batch = batch
        self.drafts: deque[Draft] = deque()

    def due_in(self, now: float) -> float:
        draft = self.drafts[0]
        if self.batch.unanswered == 0 or draft.bytes >= _BYTES:
            return 0.0
        return draft.since + (_SECONDS_OF_MANY if draft.lines >= _LINES else _SECONDS) - now


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

    def add(self, job: Job, line: bytes, *, usage: Usage | None, cost: int = 0) -> None:
        """A line as it will stand in the output, with what its answer took; or among the errors, with nothing."""
        buffer = self._buffers.get(job.batch.id)
        if buffer is None or not buffer.drafts or buffer.drafts[-1].bytes >= _MOST_SEGMENT_BYTES:
            buffer = self._begin_draft(job.batch)
        draft = buffer.drafts[-1]
        draft.add(job, line, usage=usage, cost=cost)
        self._held_bytes += len(line)
        if cost:
            job.batch.budget.owe(cost)
        if job.batch.unanswered == 0 or draft.lines == _LINES or draft.bytes >= _BYTES:
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
        draft, budget = buffer.drafts.popleft(), buffer.batch.budget
        started, size, owed = self._clock.steady(), draft.bytes, draft.cost
        await self._record_held(buffer.batch, draft)
        budget.forgive(owed - draft.cost)
        draft.settle_shards()
        for shard in draft.shards:
            if shard.settled == shard.all_settled:
                self._claims.forget(shard)
                self._shard_done()
        self._held_bytes -= size
        if not buffer.drafts:
            del self._buffers[buffer.batch.id]
        self._metrics.flush_seconds.observe(self._clock.steady() - started)

    def _begin_draft(self, batch: HeldBatch) -> _Buffer:
        buffer = self._buffers.setdefault(batch.id, _Buffer(batch))
        buffer.drafts.append(Draft(since=self._clock.steady()))
        self._changed.set()
        return buffer

    async def _record_held(self, batch: HeldBatch, draft: Draft) -> None:
        """Record the lines whose shards are still ours, however long the disk takes to come back."""
        draft.drop_lost()
        while draft.lines:
            try:
                await self._write_segment(batch, draft)
            except LeaseLost:
                await self._find_lost_shards()
            except (StoreDown, ObjectsDown) as error:
                await self._wait_for_disk(error)
            else:
                break
            draft.drop_lost()
        self._stuck = False

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

    async def _write_segment(self, batch: HeldBatch, draft: Draft) -> None:
        output, errors = b"".join(draft.output), b"".join(draft.errors)
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
                progress=draft.progress,
                segment=segment,
                errors=draft.failures,
                charges=draft.charges,
                at=int(self._clock.now()),
            )
        batch.budget.paid(draft.cost, left=left)
        failed = len(draft.errors)
        self._metrics.lines.labels("failed").inc(failed)
        self._metrics.lines.labels("succeeded").inc(draft.lines - failed)
        self._metrics.segments.inc()
        self._metrics.segment_bytes.inc(len(data))
