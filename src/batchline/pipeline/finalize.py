"""Assembles the two result files of a batch that has nothing left to run, and publishes them with its terminal state.

Segments are joined in one sequential pass, and lines that never ran get error lines. All bytes that are read are
compared with their checksums, and the lines of the segments with the counts of the shards. If anything disagrees,
nothing is published: the batch is repaired (``repair.py``) and finalized again.

The keys of the objects contain the epoch and the owner of the lease, so two finalizers never write the same object,
and only the holder of the lease can publish.
"""

import logging
from collections.abc import Callable

from batchline.domain import ids
from batchline.domain.bitmap import unsettled
from batchline.domain.errors import Damaged, LeaseLost, ObjectMissing, ObjectsDown, StoreDown
from batchline.domain.limits import STRIKES
from batchline.domain.money import units
from batchline.domain.records import BATCH_OUTPUT, Batch, File
from batchline.domain.result_order import OrderBuilder
from batchline.domain.states import BatchStatus
from batchline.pipeline.assemble import Assembler, ResultWriter
from batchline.pipeline.batch_ends import BatchEnds
from batchline.pipeline.damage import DamageLog
from batchline.pipeline.lease import renewing
from batchline.pipeline.repair import Repair
from batchline.pipeline.reuse import ReuseStep
from batchline.ports import Clock, FinalizeLease, Objects, Random, Store

log = logging.getLogger(__name__)

_MAX_REPAIRS = 8
"""A batch whose counts still disagree after this number of repairs is not repaired again. It is finalized again now and
then."""
_MAX_BACKOFF_SECONDS = 60.0
_MAX_DOUBLINGS = 6
"""The number of failures after which the longest wait is reached."""


class Finalizer:
    """Finalizes batches. ``on_batch_ended`` is called for each one: its segments and work file can be removed.

    ``on_work_available`` is called after a repair: lost lines may run again.
    """

    def __init__(
        self,
        *,
        store: Store,
        objects: Objects,
        repair: Repair,
        reuse_step: ReuseStep,
        damage_log: DamageLog,
        clock: Clock,
        random: Random,
        owner: str,
        lease_seconds: float,
        retention_seconds: int,
        batch_ends: BatchEnds,
        on_batch_ended: Callable[[], None],
        on_work_available: Callable[[], None],
    ) -> None:
        self._store, self._objects = store, objects
        self._repair, self._assembler = repair, Assembler(store=store, objects=objects, damage_log=damage_log)
        self._reuse_step = reuse_step
        self._clock, self._random = clock, random
        self._batch_ends = batch_ends
        self._on_batch_ended, self._on_work_available = on_batch_ended, on_work_available
        self._owner, self._lease_seconds, self._retention_seconds = owner, lease_seconds, retention_seconds

    async def step(self) -> bool:
        """Finalize or repair one batch that has nothing left to run, and return whether there was one.

        A batch that cannot be finalized is tried again later, and the others go first.
        """
        seconds = self._lease_seconds
        leased = await self._store.lease_finalizable(owner=self._owner, lease=seconds, at=int(self._clock.now()))
        if leased is None:
            return False
        try:
            status = await self._finalize_or_repair(leased)
        except (LeaseLost, StoreDown):
            raise
        except Exception as error:
            await self._defer(leased, error)
            if isinstance(error, ObjectsDown):
                raise
            return True
        if status is not None:
            self._on_batch_ended()
        return True

    async def _finalize_or_repair(self, leased: FinalizeLease) -> BatchStatus | None:
        """Return the terminal status of the batch, or None if it is still to be finalized.

        In that case it was repaired, or its lines took earlier answers.
        """
        batch_id, seconds = leased.batch.id, self._lease_seconds
        async with renewing(
            lambda: self._store.renew_batch(batch_id, epoch=leased.epoch, owner=self._owner, lease=seconds),
            every=seconds / 3,
            clock=self._clock,
        ):
            try:
                if not leased.following:
                    return await self._finalize(leased)
                await self._reuse_step.run(leased)
            except (Damaged, ObjectMissing):
                if leased.repairs >= _MAX_REPAIRS:
                    raise
                await self._repair.run(leased)
            except ObjectsDown:
                if not await self._repair.gives_up_unreadable(leased):
                    raise
                await self._repair.run(leased)
        self._on_work_available()
        return None

    async def _defer(self, leased: FinalizeLease, error: Exception) -> None:
        retry_in = min(2.0 ** min(leased.failures, _MAX_DOUBLINGS), _MAX_BACKOFF_SECONDS)
        log.error(
            "failed to finalize a batch, retrying",
            exc_info=not isinstance(error, ObjectsDown),
            extra={"batch": leased.batch.id, "reason": repr(error), "retry_in": retry_in},
        )
        await self._store.defer_finalize(leased, seconds=retry_in)

    async def _finalize(self, leased: FinalizeLease) -> BatchStatus:
        batch = leased.batch
        _check_counts(leased)
        output = ResultWriter(self._objects, f"results/{batch.id}/{leased.epoch}-{self._owner}-output")
        errors = ResultWriter(self._objects, f"results/{batch.id}/{leased.epoch}-{self._owner}-error")
        order = OrderBuilder()
        try:
            joined = await self._assembler.join_segments(batch, output, errors, order)
            if joined.lines != batch.completed + batch.failed:
                raise Damaged(f"{batch.id}: {joined.lines} lines in segments, {batch.completed + batch.failed} counted")
            leftovers = await self._assembler.write_leftovers(leased, errors, order)
            completed, failed = batch.completed, batch.failed + sum(each.count for each in leftovers)
            await output.commit()
            await errors.commit()
            files = [self._file(batch, result, is_error=result is errors) for result in (output, errors) if result.size]
            status = await self._store.publish(
                batch.id,
                epoch=leased.epoch,
                owner=self._owner,
                files=files,
                order=order.finish().encode(),
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
        fields = {"batch": batch.id, "status": status, "completed": completed, "failed": failed}
        log.info("batch finished", extra=fields | self._spent(batch, joined.cost))
        self._batch_ends.on_batch_ended(batch, status, completed=completed, failed=failed)
        return status

    def _spent(self, batch: Batch, cost: int) -> dict[str, object]:
        """Return the seconds since a batch was created, its tokens, and its cost in units of money."""
        usage = batch.usage
        return {
            "seconds": int(self._clock.now()) - batch.created_at,
            "input_tokens": usage.input_tokens,
            "output_tokens": usage.output_tokens,
            "cost": units(cost),
        }

    def _file(self, batch: Batch, result: ResultWriter, *, is_error: bool) -> File:
        now = int(self._clock.now())
        return File(
            id=ids.file_id(self._random.bytes(12)),
            project_id=batch.project_id,
            filename=f"{batch.id}_{'error' if is_error else 'output'}.jsonl",
            purpose=BATCH_OUTPUT,
            bytes=result.size,
            created_at=now,
            expires_at=now + (batch.output_lifetime or self._retention_seconds),
            is_error=is_error,
            object_key=result.key,
            checksum=result.checksum.value,
        )


def _check_counts(leased: FinalizeLease) -> None:
    """Raise Damaged unless every line is either counted or left over, and every left-over line has a reason."""
    batch = leased.batch
    left = sum(len(unsettled(shard.settled, shard.lines)) for shard in leased.leftovers)
    if batch.completed + batch.failed + left != batch.total:
        raise Damaged(f"{batch.id} counts {batch.completed} + {batch.failed} + {left} of {batch.total} lines")
    if batch.stop is None and any(shard.strikes < STRIKES for shard in leased.leftovers):
        raise Damaged(f"{batch.id} has lines that could not be read")
