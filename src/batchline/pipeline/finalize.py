"""Assembles the two result files of a batch that has nothing left to run, and publishes them with its terminal state.

Segments are joined in one sequential pass, and lines that never ran get error lines. The keys of the objects contain
the epoch of the lease, so two finalizers never write the same object, and only the holder of the epoch can publish.
"""

import logging
from collections.abc import AsyncIterator, Callable

from batchline.domain import ids
from batchline.domain.bitmap import unsettled
from batchline.domain.errors import LeaseLost, ObjectMissing
from batchline.domain.limits import STRIKES
from batchline.domain.lines import decode_lines
from batchline.domain.outcomes import BATCH_CANCELLED, BATCH_EXPIRED, DELIVERED_TOO_OFTEN, Failure, error_line
from batchline.domain.progress import LineErrors, count_errors
from batchline.domain.records import BATCH_OUTPUT, Batch, File, Segment, Shard
from batchline.domain.states import BatchStatus, Stop
from batchline.pipeline.lease import renewing
from batchline.ports import Clock, FinalizeLease, Objects, Random, Store, Writer
from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_SEGMENTS_PER_PAGE = 32


class Finalizer:
    """Finalizes batches. ``on_batch_ended`` is called for each one: its segments and work file can be removed."""

    def __init__(
        self,
        *,
        store: Store,
        objects: Objects,
        clock: Clock,
        random: Random,
        owner: str,
        lease_seconds: float,
        retention_seconds: int,
        metrics: Metrics,
        on_batch_ended: Callable[[], None],
    ) -> None:
        self._store, self._objects = store, objects
        self._clock, self._random = clock, random
        self._metrics, self._on_batch_ended = metrics, on_batch_ended
        self._owner, self._lease_seconds, self._retention_seconds = owner, lease_seconds, retention_seconds

    async def step(self) -> bool:
        """Finalize one batch that has nothing left to run, and return whether there was one."""
        status = await self._finalize_next()
        if status is None:
            return False
        self._metrics.batches.labels(status).inc()
        self._on_batch_ended()
        return True

    async def _finalize_next(self) -> BatchStatus | None:
        seconds = self._lease_seconds
        leased = await self._store.lease_finalizable(owner=self._owner, lease=seconds, at=int(self._clock.now()))
        if leased is None:
            return None
        batch_id, epoch = leased.batch.id, leased.epoch
        async with renewing(
            lambda: self._store.renew_batch(batch_id, epoch=epoch, owner=self._owner, lease=seconds),
            every=seconds / 3,
            clock=self._clock,
        ):
            return await self._finalize(leased)

    async def _finalize(self, leased: FinalizeLease) -> BatchStatus:
        batch = leased.batch
        output = _Result(self._objects, f"results/{batch.id}/{leased.epoch}-output")
        errors = _Result(self._objects, f"results/{batch.id}/{leased.epoch}-error")
        try:
            await self._join_segments(batch, output, errors)
            leftovers = await self._write_leftovers(leased, errors)
            completed, failed = batch.completed, batch.failed + sum(each.count for each in leftovers)
            if completed + failed != batch.total:
                raise AssertionError(f"{batch.id} counts {completed} + {failed} of {batch.total} lines")
            await output.commit()
            await errors.commit()
            files = [
                self._file(batch, result, is_error=result is errors) for result in (output, errors) if result.bytes
            ]
            status = await self._store.publish(
                batch.id,
                epoch=leased.epoch,
                files=files,
                completed=completed,
                failed=failed,
                errors=leftovers,
                at=int(self._clock.now()),
            )
        except LeaseLost:
            await output.remove()
            await errors.remove()
            raise
        finally:
            await output.close()
            await errors.close()
        log.info(
            "batch finished", extra={"batch": batch.id, "status": status, "completed": completed, "failed": failed}
        )
        return status

    async def _join_segments(self, batch: Batch, output: "_Result", errors: "_Result") -> None:
        last = 0
        while page := await self._store.segments(batch.id, after=last, limit=_SEGMENTS_PER_PAGE):
            for segment in page:
                await self._append(segment, output, errors)
            last = page[-1].id

    async def _append(self, segment: Segment, output: "_Result", errors: "_Result") -> None:
        output_bytes_left = segment.output_bytes
        async for chunk in self._chunks(segment):
            await output.write(chunk[:output_bytes_left])
            await errors.write(chunk[output_bytes_left:])
            output_bytes_left = max(0, output_bytes_left - len(chunk))

    async def _chunks(self, segment: Segment) -> AsyncIterator[bytes]:
        if segment.object_key is None:
            yield segment.data or b""
            return
        async for chunk in self._objects.stream(segment.object_key, 0, segment.output_bytes + segment.error_bytes):
            yield chunk

    async def _write_leftovers(self, leased: FinalizeLease, errors: "_Result") -> list[LineErrors]:
        """Write an error line for each line that never ran, and return their counts per shard."""
        written: list[LineErrors] = []
        for shard in leased.leftovers:
            failure = _failure_of_unrun_lines(shard, leased.batch)
            open_positions = set(unsettled(shard.settled, shard.lines))
            data = await self._objects.read(leased.work_key, shard.offset, shard.length)
            if len(data) != shard.length:
                raise ObjectMissing(f"{leased.work_key} is cut off")
            lines = [
                error_line(ids.line_id(leased.batch.id, line.index), line.custom_id, failure)
                for position, line in enumerate(decode_lines(data))
                if position in open_positions
            ]
            await errors.write(b"".join(lines))
            written += count_errors(lines)
        return written

    def _file(self, batch: Batch, result: "_Result", *, is_error: bool) -> File:
        now = int(self._clock.now())
        return File(
            id=ids.file_id(self._random.bytes(12)),
            project_id=batch.project_id,
            filename=f"{batch.id}_{'error' if is_error else 'output'}.jsonl",
            purpose=BATCH_OUTPUT,
            bytes=result.bytes,
            created_at=now,
            expires_at=now + self._retention_seconds,
            is_error=is_error,
            object_key=result.key,
        )


class _Result:
    """A result file that exists only if something was written to it."""

    def __init__(self, objects: Objects, key: str) -> None:
        self._objects = objects
        self._writer: Writer | None = None
        self.key = key
        self.bytes = 0

    async def write(self, data: bytes) -> None:
        if not data:
            return
        if self._writer is None:
            self._writer = await self._objects.create(self.key)
        await self._writer.write(data)
        self.bytes += len(data)

    async def commit(self) -> None:
        if self._writer is not None:
            await self._writer.commit()
            self._writer = None

    async def close(self) -> None:
        """Remove what was written and not committed."""
        if self._writer is not None:
            await self._writer.abort()
            self._writer = None

    async def remove(self) -> None:
        await self.close()
        await self._objects.delete(self.key)


def _failure_of_unrun_lines(shard: Shard, batch: Batch) -> Failure:
    if shard.strikes >= STRIKES:
        return DELIVERED_TOO_OFTEN
    return BATCH_EXPIRED if batch.stop is Stop.EXPIRED else BATCH_CANCELLED
