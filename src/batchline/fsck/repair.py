"""Repairs what a check found, where that is safe. It deletes nothing that a client stored.

An active batch is not repaired here: the service does it when it finalizes the batch (``pipeline/repair.py``). For such
a batch, this module closes the shards of lost lines and lets the finalizer try again at once.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from batchline.domain.errors import Damaged, LeaseLost, ObjectMissing
from batchline.domain.records import InspectedFile, Shard
from batchline.domain.result_order import OrderBuilder
from batchline.domain.states import FileState, ShardState
from batchline.fsck.batches import BatchChecker, status_before_end, usage_of
from batchline.fsck.findings import Finding, Fix, Kind, RepairStatus
from batchline.fsck.rules import is_active
from batchline.pipeline.assemble import Assembler, ResultWriter
from batchline.ports import FinalizeLease, InspectedBatch, Objects, Store, UnsettledShard

_MAX_ROUNDS = 3
"""The number of times that a batch is repaired in one run, if each time shows something new."""


class BatchRepair:
    """Repairs batches, and checks each of them again."""

    def __init__(self, *, store: Store, objects: Objects, checker: BatchChecker, assembler: Assembler) -> None:
        self._store, self._objects = store, objects
        self._checker, self._assembler = checker, assembler

    async def repair(self, batch_id: str, findings: Sequence[Finding]) -> list[Finding]:
        """Repair a batch and return all its findings, each with its ``repair_status``.

        A repair may show more: the counts of a batch can be compared once its result files can be read.
        """
        found, left = list(findings), list(findings)
        for _ in range(_MAX_ROUNDS):
            fixes = {finding.fix for finding in left if finding.fix is not None}
            rows = await self._store.inspect_batch(batch_id) if fixes else None
            if rows is None:
                break
            for fix in sorted(fixes):
                await self._apply(fix, rows, left)
            left = await self._checker.check(batch_id)
            new = [finding for finding in left if not any(finding.same_as(known) for known in found)]
            found += new
            if not new:
                break
        return [_judge(finding, left) for finding in found]

    async def _apply(self, fix: Fix, rows: InspectedBatch, findings: Sequence[Finding]) -> None:
        batch_id = rows.batch.id
        try:
            if fix is Fix.REMAKE_RESULT:
                await self._remake_results(rows, {finding.file for finding in findings if finding.fix is fix})
            elif fix is Fix.CORRECT_COUNTS:
                await self._correct_counts(rows)
            elif fix is Fix.CORRECT_DRAINED:
                await self._store.correct_drained(batch_id)
            elif fix is Fix.CORRECT_TIMES:
                await self._store.correct_times(batch_id)
            elif fix is Fix.CLOSE_SHARDS:
                await self._store.close_ended_shards(batch_id)
            elif fix is Fix.OPEN_LANES:
                await self._store.open_missing_lanes(batch_id)
            elif fix is Fix.HAND_OVER:
                await self._hand_over(rows, findings)
        except LeaseLost:
            # The rows changed since they were read. The next check shows what is left to do.
            return

    async def _remake_results(self, rows: InspectedBatch, file_ids: set[str | None]) -> None:
        """Write damaged result files again, if their segments give the same bytes as before."""
        if rows.work_key is None or (await self._checker.check_segments(rows)).damaged:
            return
        batch = replace(rows.batch, status=status_before_end(rows.batch.status))
        lease = FinalizeLease(
            batch=batch, epoch=batch.epoch, owner="", work_key=rows.work_key, leftovers=_closed_shards(rows)
        )
        files = [rows.files.get(file_id or "") for file_id in (batch.output_file_id, batch.error_file_id)]
        # Only files that have a row are committed.
        keys = [
            f"results/{batch.id}/remade-{number}" if file is None else file.object_key
            for number, file in enumerate(files)
        ]
        output, errors = writers = [ResultWriter(self._objects, key) for key in keys]
        try:
            # The order that was stored with the files stays as it is.
            order = OrderBuilder()
            await self._assembler.join_segments(batch, output, errors, order)
            await self._assembler.write_leftovers(lease, errors, order)
            for file, writer in zip(files, writers, strict=True):
                if file is not None and file.id in file_ids and _is_content_of(writer, file):
                    await self._replace(file, writer)
        except (Damaged, ObjectMissing):
            return
        finally:
            for writer in writers:
                await writer.close()

    async def _replace(self, file: InspectedFile, writer: ResultWriter) -> None:
        """Give a file its bytes back under the same key, unless it was deleted meanwhile."""
        await writer.commit()
        now = await self._store.inspect_file(file.id)
        if now is None or now.state is not FileState.STORED:
            await writer.remove()

    async def _correct_counts(self, rows: InspectedBatch) -> None:
        results = await self._checker.check_results(rows)
        if results.knows_all:
            tally, usage = results.tally, usage_of(rows, results)
            await self._store.correct_counts(
                rows.batch, completed=tally.succeeded, failed=tally.failed, usage=usage, errors=tally.errors
            )

    async def _hand_over(self, rows: InspectedBatch, findings: Sequence[Finding]) -> None:
        if not is_active(rows.batch):
            return
        segments = await self._checker.check_segments(rows)
        work = await self._checker.check_work(rows, segments)
        closing = {shard.n: shard for shard in work.unsettled}
        without_owner = {finding.shard for finding in findings if finding.kind is Kind.LEASE}
        for shard in rows.shards:
            if shard.n in without_owner and shard.n not in closing:
                leased = shard.state is ShardState.LEASED
                closing[shard.n] = UnsettledShard(
                    n=shard.n, epoch=shard.epoch, leased=leased, former=shard.settled, settled=shard.settled
                )
        await self._store.hand_over(rows.batch.id, list(closing.values()))


def _judge(finding: Finding, left: Sequence[Finding]) -> Finding:
    if not any(finding.same_as(found) for found in left):
        return replace(finding, repair_status=RepairStatus.REPAIRED)
    return replace(
        finding, repair_status=RepairStatus.HANDED_OVER if finding.fix is Fix.HAND_OVER else RepairStatus.NOT_POSSIBLE
    )


def _closed_shards(rows: InspectedBatch) -> list[Shard]:
    return [shard for shard in rows.shards if shard.state is ShardState.CLOSED]


def _is_content_of(writer: ResultWriter, file: InspectedFile) -> bool:
    return writer.size == file.bytes and file.checksum in (None, writer.checksum.value)
