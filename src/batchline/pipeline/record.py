"""Records outcomes: first their bytes as a segment, durably; then, in one fenced transaction, that they count.

Outcomes are buffered per batch. They are flushed a second after the first one, or after 50 ms once they are 256 lines;
earlier when they reach 1 MiB, and at once when no other line of the batch is pending.
"""

import asyncio
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from itertools import count

from msgspec.json import encode as encode_json

from batchline.domain.checksum import checksum_of
from batchline.domain.errors import LeaseLost, ObjectsDown, StoreDown
from batchline.domain.held_bytes import HeldBytes
from batchline.domain.progress import LineErrors, count_errors
from batchline.domain.records import Charge, Segment, ShardProgress
from batchline.domain.result_order import encode_layout
from batchline.domain.usage import Usage, total
from batchline.pipeline.claim import Claims
from batchline.pipeline.job import HeldBatch, HeldShard, Job
from batchline.ports import Clock, Objects, ShardStore
from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

FLUSH_INTERVAL_SECONDS = 1.0
FAST_FLUSH_LINES = 256
"""From this number of lines on, the shorter interval applies."""
FAST_FLUSH_INTERVAL_SECONDS = 0.05
"""A flush costs as much as hundreds of lines, so a fast upstream must not cause one for every few lines."""
FLUSH_BYTES = 1024 * 1024
INLINE_SEGMENT_BYTES = 64 * 1024
"""A segment smaller than this is kept in the store; a larger one becomes an object."""
MAX_SEGMENT_BYTES = 8 * 1024 * 1024
"""A segment takes no further line once it is this large. It grows beyond ``FLUSH_BYTES`` only while storage is slow or
unavailable."""
_STORED_FOR_SECONDS = 600.0
"""An object that no row names exists for at least this time: the sweep deletes it after an hour or later."""
STORAGE_RETRY_SECONDS = 1.0


class SegmentBuilder:
    """The outcomes of one batch that will be recorded together."""

    def __init__(self, *, since: float) -> None:
        self.since = since
        self.lines = self.bytes = self.cost = 0
        self.stored_key: str | None = None
        """The object that has exactly these lines; None if none was stored since the last line was added or dropped."""
        self.stored_at = 0.0
        self._parts: dict[HeldShard, _ShardPart] = {}

    def add(self, job: Job, line: bytes, *, usage: Usage | None, cost: int) -> None:
        """Add the line of one job. A line that failed has no usage."""
        self.stored_key = None
        part = self._parts.get(job.shard)
        if part is None:
            part = self._parts[job.shard] = _ShardPart()
        part.settled |= 1 << job.position
        if usage is None:
            part.errors.append(line)
            part.error_indexes.append(job.line.index)
        else:
            part.output.append(line)
            part.output_indexes.append(job.line.index)
            part.usages[job.model.id].append(usage)
        if cost:
            part.costs[job.model.id] += cost
            self.cost += cost
        self.lines += 1
        self.bytes += len(line)

    def drop_lost(self) -> None:
        """Remove the lines of shards that another worker holds now."""
        for shard in [shard for shard in self._parts if shard.lost]:
            lost = self._parts.pop(shard)
            self.stored_key = None
            self.lines -= len(lost.output) + len(lost.errors)
            self.cost -= lost.costs.total()

    @property
    def shards(self) -> list[HeldShard]:
        return list(self._parts)

    @property
    def output(self) -> list[bytes]:
        return [line for part in self._parts.values() for line in part.output]

    @property
    def errors(self) -> list[bytes]:
        return [line for part in self._parts.values() for line in part.errors]

    @property
    def indexes(self) -> list[int]:
        """The index of each line in its batch: those of the output first."""
        parts = self._parts.values()
        output = [index for part in parts for index in part.output_indexes]
        return output + [index for part in parts for index in part.error_indexes]

    @property
    def progress(self) -> list[ShardProgress]:
        return [part.progress(shard) for shard, part in self._parts.items()]

    @property
    def charges(self) -> list[Charge]:
        return [charge for part in self._parts.values() for charge in part.charges]

    @property
    def error_counts(self) -> list[LineErrors]:
        return count_errors(self.errors)

    def mark_settled(self) -> None:
        """Set the bits of all lines in their shards, because the segment was recorded."""
        for shard, part in self._parts.items():
            shard.settled |= part.settled


class _ShardPart:
    """The lines of one shard in a segment."""

    def __init__(self) -> None:
        self.settled = 0
        self.output: list[bytes] = []
        self.output_indexes: list[int] = []
        self.errors: list[bytes] = []
        self.error_indexes: list[int] = []
        self.usages: defaultdict[str, list[Usage]] = defaultdict(list)
        """The usage of each answer, by model."""
        self.costs: Counter[str] = Counter()

    @property
    def charges(self) -> list[Charge]:
        return [
            Charge(model=model, requests=len(usages), usage=total(usages), cost=self.costs[model])
            for model, usages in self.usages.items()
        ]

    def progress(self, shard: HeldShard) -> ShardProgress:
        settled = shard.settled | self.settled
        return ShardProgress(
            n=shard.n,
            epoch=shard.epoch,
            former=shard.settled.to_bytes((shard.lines + 7) // 8, "little"),
            settled=settled.to_bytes((shard.lines + 7) // 8, "little"),
            completed=len(self.output),
            failed=len(self.errors),
            usage=total([charge.usage for charge in self.charges]),
            done=settled == shard.all_settled,
        )


class _Buffer:
    """The unrecorded outcomes of one batch, oldest first. The last segment takes new ones."""

    def __init__(self, batch: HeldBatch) -> None:
        self.batch = batch
        self.segments: deque[SegmentBuilder] = deque()
        self.lines = 0
        """The number of lines in all segments, including the one that is being recorded."""
        self.is_recording = False

    def seconds_to_flush(self, now: float) -> float:
        segment = self.segments[0]
        if self.batch.pending_lines == 0 or segment.bytes >= FLUSH_BYTES:
            return 0.0
        many = segment.lines >= FAST_FLUSH_LINES
        return segment.since + (FAST_FLUSH_INTERVAL_SECONDS if many else FLUSH_INTERVAL_SECONDS) - now


class Recorder:
    """Buffers outcomes and records them in the background.

    ``on_recorded`` is called after segments were recorded, once for those that end together, and ``on_batch_left`` when
    the last shard that is held of a batch has ended.
    """

    def __init__(
        self,
        *,
        store: ShardStore,
        objects: Objects,
        claims: Claims,
        clock: Clock,
        owner: str,
        held_bytes: HeldBytes,
        metrics: Metrics,
        on_recorded: Callable[[], None],
        on_batch_left: Callable[[], None],
    ) -> None:
        self._store, self._objects, self._claims, self._clock = store, objects, claims, clock
        self._owner, self._held_bytes = owner, held_bytes
        self._metrics = metrics
        self._on_recorded, self._on_batch_left = on_recorded, on_batch_left
        self._buffers: dict[HeldBatch, _Buffer] = {}
        """A batch that was lost and claimed again has two for a while, with shards and a budget of its own each."""
        self._segment_numbers = count(1)
        self._failing: set[HeldBatch] = set()
        """The batches whose last attempt to record failed because storage is unavailable."""
        self._closing = self._has_recorded = False
        self._changed = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether no line may start: too many bytes are held, or storage is unavailable.

        Storage is unavailable while it is for one batch. That others can be recorded proves nothing: a small segment
        needs no object store. A process that ends meanwhile loses every answer that is not recorded.
        """
        return bool(self._failing) or self._held_bytes.full

    @property
    def unrecorded(self) -> Counter[str]:
        """The number of lines of each batch that have an outcome that is not recorded yet."""
        lines = Counter[str]()
        for batch, buffer in self._buffers.items():
            lines[batch.id] += buffer.lines
        return lines

    def holds(self, batch: HeldBatch) -> bool:
        return batch in self._buffers

    def add(self, job: Job, line: bytes, *, usage: Usage | None, cost: int = 0) -> None:
        """Buffer a line of the output file with the usage and cost of its answer, or a line of the error file."""
        buffer = self._buffers.get(job.batch)
        if buffer is None or not buffer.segments or buffer.segments[-1].bytes >= MAX_SEGMENT_BYTES:
            buffer = self._begin_segment(job.batch)
        builder = buffer.segments[-1]
        builder.add(job, line, usage=usage, cost=cost)
        self._held_bytes.add_unrecorded(len(line))
        buffer.lines += 1
        if cost:
            job.batch.budget.add_cost(cost)
        # While a segment of the batch is being recorded, no other can be, and the end of that wakes ``run`` anyway.
        if not buffer.is_recording and (
            job.batch.pending_lines == 0 or builder.lines == FAST_FLUSH_LINES or builder.bytes >= FLUSH_BYTES
        ):
            self._changed.set()

    def wake(self) -> None:
        """Check again which batches are due: one may have no pending line any more."""
        self._changed.set()

    async def run(self) -> None:
        """Record what is due until ``close``, and then everything that is left."""
        async with asyncio.TaskGroup() as flushes:
            while self._buffers or not self._closing:
                self._changed.clear()
                wait_seconds = self._start_due(flushes)
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_seconds):
                        await self._changed.wait()
                if self._has_recorded:
                    self._has_recorded = False
                    self._on_recorded()

    def close(self) -> None:
        """Let ``run`` record what is left, and end."""
        self._closing = True
        self._changed.set()

    def _start_due(self, flushes: asyncio.TaskGroup) -> float | None:
        """Start to record the oldest segment of each batch that is due, and return the seconds until the next is due.

        Batches do not wait for each other, since one of them may take long. Only one segment of a batch is recorded at
        a time.
        """
        now, waits = self._clock.steady(), []
        for buffer in self._buffers.values():
            if buffer.is_recording:
                continue
            wait = buffer.seconds_to_flush(now)
            if wait <= 0 or self._closing:
                buffer.is_recording = True
                flushes.create_task(self._flush_batch(buffer))
            else:
                waits.append(wait)
        return min(waits, default=None)

    async def _flush_batch(self, buffer: _Buffer) -> None:
        builder, budget = buffer.segments.popleft(), buffer.batch.budget
        started, size, lines, cost = self._clock.steady(), builder.bytes, builder.lines, builder.cost
        await self._record_held(buffer.batch, builder)
        budget.remove_cost(cost - builder.cost)
        builder.mark_settled()
        done = [shard for shard in builder.shards if shard.settled == shard.all_settled]
        for shard in done:
            self._claims.forget(shard)
        if done and not buffer.batch.shards:
            self._on_batch_left()
        self._held_bytes.on_recorded(size)
        buffer.lines -= lines
        if not buffer.segments:
            del self._buffers[buffer.batch]
        buffer.is_recording, self._has_recorded = False, True
        self._changed.set()
        self._metrics.flush_seconds.observe(self._clock.steady() - started)

    def _begin_segment(self, batch: HeldBatch) -> _Buffer:
        buffer = self._buffers.setdefault(batch, _Buffer(batch))
        buffer.segments.append(SegmentBuilder(since=self._clock.steady()))
        if not buffer.is_recording:
            self._changed.set()
        return buffer

    async def _record_held(self, batch: HeldBatch, builder: SegmentBuilder) -> None:
        """Record the lines whose shards are still held here. Retry for as long as storage is unavailable."""
        builder.drop_lost()
        while builder.lines:
            try:
                await self._write_segment(batch, builder)
            except LeaseLost:
                await self._find_lost_shards(batch)
            except (StoreDown, ObjectsDown) as error:
                await self._wait_for_storage(batch, error)
            else:
                break
            builder.drop_lost()
        self._failing.discard(batch)

    async def _find_lost_shards(self, batch: HeldBatch) -> None:
        try:
            lost = await self._claims.find_lost(batch)
        except StoreDown as error:
            await self._wait_for_storage(batch, error)
        else:
            log.warning("leases lost, dropping their lines", extra={"batch": batch.id, "shards": len(lost)})
            if not lost:
                # The lines were lost before, or the store disagrees with itself: do not try again at once.
                await self._clock.sleep(STORAGE_RETRY_SECONDS)

    async def _wait_for_storage(self, batch: HeldBatch, error: Exception) -> None:
        if not self._failing:
            log.error("storage unavailable: buffering results, dispatch paused", extra={"reason": str(error)})
        self._failing.add(batch)
        await self._clock.sleep(STORAGE_RETRY_SECONDS)

    async def _put_once(self, batch: HeldBatch, builder: SegmentBuilder, data: bytes) -> str:
        """Store a segment as an object and return its key. While only the database fails, it is seldom stored again."""
        now = self._clock.steady()
        if builder.stored_key is None or now - builder.stored_at > _STORED_FOR_SECONDS:
            key = f"segments/{batch.id}/{self._owner}-{next(self._segment_numbers)}"
            await self._objects.put(key, data)
            builder.stored_key, builder.stored_at = key, now
        return builder.stored_key

    async def _write_segment(self, batch: HeldBatch, builder: SegmentBuilder) -> None:
        output_lines, error_lines = builder.output, builder.errors
        output, errors = b"".join(output_lines), b"".join(error_lines)
        data, key = output + errors, None
        if len(data) >= INLINE_SEGMENT_BYTES:
            key = await self._put_once(batch, builder, data)
        charges = builder.charges
        segment = Segment(
            output_bytes=len(output),
            error_bytes=len(errors),
            object_key=key,
            data=data if key is None else None,
            lines=builder.lines,
            checksum=checksum_of(data),
            charges=encode_json(charges),
            layout=encode_layout(builder.indexes, output_lines + error_lines),
        )
        with batch.budget.recording():
            left = await self._store.record(
                batch.id,
                owner=self._owner,
                progress=builder.progress,
                segment=segment,
                errors=builder.error_counts,
                charges=charges,
                at=int(self._clock.now()),
            )
        batch.budget.on_recorded(builder.cost, left)
        failed = len(error_lines)
        self._metrics.lines.labels("failed").inc(failed)
        self._metrics.lines.labels("succeeded").inc(builder.lines - failed)
        self._metrics.on_charges(charges)
        self._metrics.segments.inc()
        self._metrics.segment_bytes.inc(len(data))
