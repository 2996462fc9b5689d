"""Checks one batch: its rows, its objects, and that every line of its input is in its results exactly once.

All rows of a batch are read at one moment, so they can be compared with each other while the service runs. An object is
written before the row that names it. It is deleted after the row of its file has changed, or, if it belongs to the work
of an ended batch, just before its row is deleted. So if an object is not what its row says, the rows are read once
more: a finding counts only if the state of the batch has not changed meanwhile.
"""

from collections.abc import AsyncIterator, Iterator

from batchline.domain.records import Segment
from batchline.domain.states import TERMINAL, BatchStatus, FileState, Stop
from batchline.domain.usage import Usage
from batchline.fsck.findings import Checked, Finding, Fix, Kind
from batchline.fsck.reading import ObjectReader
from batchline.fsck.results import ResultCheck, ResultFileReader
from batchline.fsck.rules import (
    broken_rules,
    is_active,
    recorded_usage,
    settle_usage,
    tokens,
    wrong_result_rows,
    wrong_usage,
)
from batchline.fsck.segments import SegmentCheck, SegmentReader
from batchline.fsck.tally import LineNumbers, LineTally
from batchline.fsck.work import WorkCheck, WorkReader
from batchline.ports import Clock, InspectedBatch, Store

_MAX_CHECKS = 8
"""The most checks of one batch: it is checked again if its state changed meanwhile, which happens only a few times."""
_SETTLE_SECONDS = 1.0
"""The pause before the rows are read again: the objects of a batch's work are deleted just before its rows."""
_RESTORE = "Restore it from a backup if there is one"


class BatchChecker:
    """Checks batches. ``work_retention_seconds`` says how long the work of an ended batch is kept."""

    def __init__(
        self, *, store: Store, reader: ObjectReader, checked: Checked, clock: Clock, work_retention_seconds: int
    ) -> None:
        self._store, self._clock, self._checked = store, clock, checked
        self._work_retention_seconds = work_retention_seconds
        self._segments = SegmentReader(store, reader, checked)
        self._work = WorkReader(reader)
        self._results = ResultFileReader(reader)

    async def check(self, batch_id: str) -> list[Finding]:
        """Return the findings of a batch, after two checks that saw it in the same state. A deleted batch has none."""
        rows, before = await self._store.inspect_batch(batch_id), None
        segments = self._checked.segments
        findings: list[Finding] = []
        for _ in range(_MAX_CHECKS):
            if rows is None:
                return []
            self._checked.segments = segments
            findings = [finding async for finding in self.examine(rows)]
            if not findings or (before is not None and _progress_of(rows) == _progress_of(before)):
                return findings
            await self._clock.sleep(_SETTLE_SECONDS)
            before, rows = rows, await self._store.inspect_batch(batch_id)
        return findings

    async def examine(self, rows: InspectedBatch) -> AsyncIterator[Finding]:
        """Yield what is wrong with a batch as its rows were at one moment."""
        for finding in broken_rules(rows):
            yield finding
        if is_active(rows.batch):
            segments = await self._segments.check(rows)
            work = await self.check_work(rows, segments)
            for finding in _active_findings(rows, segments, work):
                yield finding
        elif rows.batch.in_progress_at is not None:
            async for finding in self._examine_ended(rows):
                yield finding
        elif rows.batch.status in TERMINAL:
            for finding in wrong_result_rows(rows):
                yield finding

    async def check_segments(self, rows: InspectedBatch) -> SegmentCheck:
        """Read all segments of a batch."""
        return await self._segments.check(rows)

    async def check_work(self, rows: InspectedBatch, segments: SegmentCheck) -> WorkCheck:
        """Read the work file of a batch, and compare it with its segments."""
        return await self._work.check(rows, segments.tally, compares_bits=not segments.damaged)

    async def check_results(self, rows: InspectedBatch) -> ResultCheck:
        """Read the result files of an ended batch."""
        return await self._results.check(rows)

    async def _examine_ended(self, rows: InspectedBatch) -> AsyncIterator[Finding]:
        results = await self.check_results(rows)
        renamed = await self._renamed(rows, results.tally)
        for finding in _ended_findings(rows, results, renamed):
            yield finding
        if self._keeps_work(rows):
            for segment, problem in (await self.check_segments(rows)).damaged:
                yield _damaged_segment(
                    rows,
                    segment,
                    problem,
                    "The batch has ended, so nothing needs it any more but a copy of the database from before its end. "
                    "It is deleted with the other work of the batch.",
                )

    def _keeps_work(self, rows: InspectedBatch) -> bool:
        """Return whether the work of an ended batch must still exist."""
        batch = rows.batch
        ended_at = batch.completed_at or batch.expired_at or batch.cancelled_at or 0
        return rows.work_key is not None and ended_at + self._work_retention_seconds > self._clock.now()

    async def _renamed(self, rows: InspectedBatch, tally: LineTally) -> LineNumbers:
        """Return the lines whose result has another custom_id than the work file, or else the input file, has."""
        source = rows.files.get(rows.batch.input_file_id)
        if self._keeps_work(rows):
            return (await self._work.check(rows, tally, compares_bits=False)).renamed
        if source is not None and source.state is FileState.STORED:
            return await self._results.renamed(source, tally)
        return LineNumbers()


def _progress_of(rows: InspectedBatch) -> object:
    """Return what changes when a batch moves on. While its lines run, nothing of this changes."""
    batch = rows.batch
    files = sorted((file.id, file.state) for file in rows.files.values())
    return batch.status, batch.stop, rows.repairs, rows.work_key, batch.output_file_id, batch.error_file_id, files


def _active_findings(rows: InspectedBatch, segments: SegmentCheck, work: WorkCheck) -> Iterator[Finding]:
    next_step = _what_a_repair_does(rows)
    for segment, problem in segments.damaged:
        yield _damaged_segment(rows, segment, problem, next_step, fix=Fix.HAND_OVER)
    for shard, problem in work.damaged:
        source = rows.files.get(rows.batch.input_file_id)
        yield Finding(
            kind=Kind.WORK,
            batch=rows.batch.id,
            object=rows.work_key,
            shard=shard.n,
            problem=(
                f"shard {shard.n} of the work file {rows.work_key}, {shard.lines} lines at byte {shard.offset}, "
                f"{problem}"
            ),
            next=(
                "The service makes the work file again from the input file when no other line of the batch is left."
                if source is not None and source.state is FileState.STORED
                else "Its input file is gone too: the lines of the shard that have no result will fail."
            ),
            fix=Fix.HAND_OVER,
        )
    yield from _wrong_work(rows, work)
    if segments.damaged:
        return
    tally = segments.tally
    for numbers, problem in (
        (work.lost, "count as recorded, but have no result"),
        (work.repeating, "have a result, but do not count as recorded"),
        (work.renamed, "have a result with another custom_id"),
        (tally.lines.repeated, "have more than one result"),
    ):
        if numbers.count:
            yield _lines(rows, numbers, problem, next_step, fix=Fix.HAND_OVER)
    yield from _wrong_active_counts(rows, tally, next_step)


def _wrong_work(rows: InspectedBatch, work: WorkCheck) -> Iterator[Finding]:
    if work.damaged:
        return
    for numbers, problem in (
        (work.lines.missing(), "are in no shard of the work file"),
        (work.lines.repeated, "are in more than one shard of the work file"),
    ):
        if numbers.count:
            yield _lines(
                rows,
                numbers,
                problem,
                "The service makes the work file again from the input file, if that still exists.",
                fix=Fix.HAND_OVER,
            )


def _wrong_active_counts(rows: InspectedBatch, tally: LineTally, next_step: str) -> Iterator[Finding]:
    batch_id = rows.batch.id
    completed, failed = (sum(getattr(shard, name) for shard in rows.shards) for name in ("completed", "failed"))
    usage = recorded_usage(rows.shards)
    found_usage = settle_usage(rows, usage, found=tally.usage)
    if (completed, failed) != (tally.succeeded, tally.failed):
        yield Finding(
            kind=Kind.COUNTS,
            batch=batch_id,
            problem=(
                f"its shards count {completed} lines that succeeded and {failed} that failed, its segments have "
                f"{tally.succeeded} and {tally.failed}"
            ),
            next=next_step,
            fix=Fix.HAND_OVER,
        )
    elif usage != found_usage:
        yield Finding(
            kind=Kind.COUNTS,
            batch=batch_id,
            problem=f"its shards count {tokens(usage)} tokens, its segments have {tokens(tally.usage)}",
            next="Run with --repair once the batch has ended: its tokens are then set to those of its results.",
        )
    if rows.failed_by_code != failed:
        yield Finding(
            kind=Kind.COUNTS,
            batch=batch_id,
            problem=f"its errors by code sum to {rows.failed_by_code}, but {failed} lines failed",
            next="Only its progress shows it. Run with --repair once the batch has ended.",
        )
    yield from wrong_usage(rows, completed=completed, usage=usage)


def _ended_findings(rows: InspectedBatch, results: ResultCheck, renamed: LineNumbers) -> Iterator[Finding]:
    batch, tally = rows.batch, results.tally
    yield from wrong_result_rows(rows)
    for file, problem in results.damaged:
        yield Finding(
            kind=Kind.RESULT,
            batch=batch.id,
            file=file.id,
            object=file.object_key,
            problem=f"its {'error' if file.is_error else 'output'} file {file.id} ({file.object_key}) {problem}",
            next=(
                "It can be made again from the segments of the batch: run with --repair."
                if rows.work_key is not None
                else f"{_RESTORE}: the segments it was made from are deleted."
            ),
            fix=None if rows.work_key is None else Fix.REMAKE_RESULT,
        )
    if not results.damaged:
        yield from _wrong_lines(rows, results, renamed)
    yield from _wrong_ended_counts(rows, results)
    yield from wrong_usage(
        rows,
        completed=tally.succeeded if results.knows_output else batch.completed,
        usage=usage_of(rows, results),
    )


def _wrong_lines(rows: InspectedBatch, results: ResultCheck, renamed: LineNumbers) -> Iterator[Finding]:
    tally, next_step = results.tally, f"{_RESTORE}, or run these lines again in a new batch."
    missing = tally.lines.missing() if results.knows_all else LineNumbers()
    for numbers, problem in (
        (missing, "are in neither result file"),
        (tally.lines.repeated, "are in the result files more than once"),
        (renamed, "have another custom_id in the results than in the input"),
    ):
        if numbers.count:
            yield _lines(rows, numbers, problem, next_step)
    if tally.lines.foreign:
        yield Finding(
            kind=Kind.LINES,
            batch=rows.batch.id,
            problem=f"its result files have {tally.lines.foreign} lines that are not of this batch",
            next=next_step,
        )


def usage_of(rows: InspectedBatch, results: ResultCheck) -> Usage:
    """Return the tokens of an ended batch, by its output file if that can be read."""
    counted = rows.batch.usage
    return settle_usage(rows, counted, found=results.tally.usage) if results.knows_output else counted


def _wrong_ended_counts(rows: InspectedBatch, results: ResultCheck) -> Iterator[Finding]:
    batch, tally = rows.batch, results.tally
    problems = []
    if results.knows_output and batch.completed != tally.succeeded:
        problems.append(f"it counts {batch.completed} lines that succeeded, its output file has {tally.succeeded}")
    if results.knows_errors and batch.failed != tally.failed:
        problems.append(f"it counts {batch.failed} lines that failed, its error file has {tally.failed}")
    if batch.usage != (usage := usage_of(rows, results)):
        problems.append(f"it counts {tokens(batch.usage)} tokens, its output file has {tokens(usage)}")
    failed = tally.failed if results.knows_errors else batch.failed
    if rows.failed_by_code != failed:
        problems.append(f"its errors by code sum to {rows.failed_by_code}, but {failed} lines failed")
    if batch.completed + batch.failed != batch.total and not problems:
        problems.append(f"it counts {batch.completed} and {batch.failed} of {batch.total} lines")
    can_be_corrected = results.knows_all and tally.succeeded + tally.failed == batch.total
    for problem in problems:
        yield Finding(
            kind=Kind.COUNTS,
            batch=batch.id,
            problem=problem,
            next=(
                "Run with --repair: the counts are set to those of the result files."
                if can_be_corrected
                else "It cannot be corrected, because not all of its results can be read."
            ),
            fix=Fix.CORRECT_COUNTS if can_be_corrected else None,
        )


def _damaged_segment(
    rows: InspectedBatch, segment: Segment, problem: str, next_step: str, *, fix: Fix | None = None
) -> Finding:
    lines = "" if segment.lines is None else f" with the results of {segment.lines} lines"
    return Finding(
        kind=Kind.SEGMENT,
        batch=rows.batch.id,
        object=segment.object_key,
        problem=f"the segment {segment.place}{lines} {problem}",
        next=next_step,
        fix=fix,
    )


def _lines(
    rows: InspectedBatch, numbers: LineNumbers, problem: str, next_step: str, *, fix: Fix | None = None
) -> Finding:
    return Finding(
        kind=Kind.LINES, batch=rows.batch.id, problem=f"lines that {problem}: {numbers}", next=next_step, fix=fix
    )


def _what_a_repair_does(rows: InspectedBatch) -> str:
    if rows.batch.stop is None:
        return "The service repairs the batch when it is finalized: lines without a result run again within its window."
    reason = {Stop.CANCELLED: "was cancelled", Stop.EXPIRED: "has expired", Stop.FAILED: "was ended by hand"}
    return (
        "The service repairs the batch when it is finalized: lines without a result fail, because the batch "
        f"{reason[rows.batch.stop]}."
    )


def status_before_end(status: BatchStatus) -> BatchStatus:
    """Return the state in which a batch that ended with this status was finalized."""
    return {
        BatchStatus.COMPLETED: BatchStatus.FINALIZING,
        BatchStatus.CANCELLED: BatchStatus.CANCELLING,
        BatchStatus.EXPIRED: BatchStatus.IN_PROGRESS,
    }[status]
