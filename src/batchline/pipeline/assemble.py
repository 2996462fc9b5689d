"""Assembles the result files of a batch: joins its segments, and adds error lines for the lines that never ran.

The same rows always give the same bytes, so a result file can be made again as long as the segments exist.
"""

from collections.abc import AsyncIterator

from msgspec import Struct

from batchline.domain import ids
from batchline.domain.bitmap import unsettled
from batchline.domain.checksum import Checksum, checksum_of
from batchline.domain.errors import Damaged, ObjectMissing
from batchline.domain.limits import STRIKES
from batchline.domain.lines import lines_of
from batchline.domain.outcomes import (
    BATCH_CANCELLED,
    BATCH_EXPIRED,
    DELIVERED_TOO_OFTEN,
    ENDED_BY_OPERATOR,
    LOST,
    Failure,
    error_line,
)
from batchline.domain.progress import LineErrors, count_errors
from batchline.domain.records import Batch, Segment, Shard
from batchline.domain.result_order import OrderBuilder
from batchline.domain.states import BatchStatus, Stop
from batchline.pipeline.damage import DamageLog
from batchline.pipeline.record import FLUSH_BYTES
from batchline.pipeline.segments import stored_segments
from batchline.ports import FinalizeLease, Objects, Store, Writer

_READ_AT_ONCE_BYTES = 2 * FLUSH_BYTES
"""A segment up to this size is read at once, as nearly all are. Each chunk of a larger one is a hop between threads."""


class ResultWriter:
    """A result file that exists only if something was written to it."""

    def __init__(self, objects: Objects, key: str) -> None:
        self._objects = objects
        self._writer: Writer | None = None
        self.key = key
        self.checksum = Checksum()

    @property
    def size(self) -> int:
        """The bytes that were written."""
        return self.checksum.bytes

    async def write(self, data: bytes) -> None:
        """Append bytes."""
        if not data:
            return
        if self._writer is None:
            self._writer = await self._objects.create(self.key)
        await self._writer.write(data)
        self.checksum.update(data)

    async def commit(self) -> None:
        """Make the file durable under its key, if anything was written."""
        if self._writer is not None:
            await self._writer.commit()
            self._writer = None

    async def close(self) -> None:
        """Remove the bytes that were written and not committed."""
        if self._writer is not None:
            await self._writer.abort()
            self._writer = None

    async def remove(self) -> None:
        """Remove the file, committed or not."""
        await self.close()
        await self._objects.delete(self.key)


class Joined(Struct, frozen=True, kw_only=True):
    """The lines of all segments of a batch, and their cost in nano-units."""

    lines: int
    cost: int


class Assembler:
    """Writes the lines of both result files. All segments that it reads are compared with their checksums."""

    def __init__(self, *, store: Store, objects: Objects, damage_log: DamageLog) -> None:
        self._store, self._objects, self._damage_log = store, objects, damage_log

    async def join_segments(
        self, batch: Batch, output: ResultWriter, errors: ResultWriter, order: OrderBuilder
    ) -> Joined:
        """Append all segments to the results, and return their lines and cost. Raise Damaged or ObjectMissing."""
        lines = cost = 0
        async for segment in stored_segments(self._store, batch.id):
            if segment.is_emptied:
                order.add_emptied(segment.id, segment.layout or b"")
            else:
                lines += await self._append(batch, segment, output, errors, order)
                cost += segment.cost
        return Joined(lines=lines, cost=cost)

    async def _append(
        self, batch: Batch, segment: Segment, output: ResultWriter, errors: ResultWriter, order: OrderBuilder
    ) -> int:
        output_bytes_left, checksum, line_ends = segment.output_bytes, Checksum(), 0
        output_at, error_at, chunks = output.size, errors.size, list[bytes]()
        try:
            async for chunk in self._chunks(segment):
                if order.wants_lines:
                    chunks.append(chunk)
                await output.write(chunk[:output_bytes_left])
                await errors.write(chunk[output_bytes_left:])
                output_bytes_left = max(0, output_bytes_left - len(chunk))
                checksum.update(chunk)
                if segment.lines is None:
                    line_ends += chunk.count(b"\n")
            segment.verify(checksum)
        except (Damaged, ObjectMissing):
            self._damage_log.report("segment", batch=batch.id, key=segment.place)
            raise
        order.add(
            segment.id,
            output_bytes=segment.output_bytes,
            error_bytes=segment.error_bytes,
            checksum=checksum.value,
        )
        data = b"".join(chunks)
        order.add_lines(data[: segment.output_bytes], is_error=False, offset=output_at)
        order.add_lines(data[segment.output_bytes :], is_error=True, offset=error_at)
        return line_ends if segment.lines is None else segment.lines

    async def _chunks(self, segment: Segment) -> AsyncIterator[bytes]:
        if segment.object_key is None:
            yield segment.data or b""
            return
        size = segment.output_bytes + segment.error_bytes
        if size <= _READ_AT_ONCE_BYTES:
            yield await self._objects.read(segment.object_key, 0, size)
            return
        async for chunk in self._objects.stream(segment.object_key, 0, size):
            yield chunk

    async def write_leftovers(
        self, leased: FinalizeLease, errors: ResultWriter, order: OrderBuilder
    ) -> list[LineErrors]:
        """Write an error line for each line that never ran, and return their counts per shard.

        Raise Damaged or ObjectMissing.
        """
        written: list[LineErrors] = []
        for shard in leased.leftovers:
            failure = _failure_of_unrun_lines(shard, leased.batch)
            open_positions = set(unsettled(shard.settled, shard.lines))
            if not open_positions:
                continue
            data = await self._objects.read(leased.work_key, shard.offset, shard.length)
            lines = [
                error_line(ids.line_id(leased.batch.id, line.index), line.custom_id, failure)
                for position, line in enumerate(lines_of(shard, data))
                if position in open_positions
            ]
            data = b"".join(lines)
            if order.wants_lines:
                order.add_lines(data, is_error=True, offset=errors.size)
            order.add(order.next_segment, output_bytes=0, error_bytes=len(data), checksum=checksum_of(data))
            await errors.write(data)
            written += count_errors(lines)
        return written


def _failure_of_unrun_lines(shard: Shard, batch: Batch) -> Failure:
    if shard.strikes >= STRIKES:
        return DELIVERED_TOO_OFTEN
    if batch.stop is Stop.FAILED:
        return ENDED_BY_OPERATOR
    if batch.stop is Stop.EXPIRED and batch.status is BatchStatus.FINALIZING:
        # The batch was finalizing before. The results of these lines were lost, and they did not run again in time.
        return LOST
    return BATCH_EXPIRED if batch.stop is Stop.EXPIRED else BATCH_CANCELLED
