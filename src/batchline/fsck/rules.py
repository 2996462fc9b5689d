"""Checks the rows of one batch against each other: states, times, leases, lanes, counts and usage."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from batchline.domain.bitmap import unsettled
from batchline.domain.records import Batch, InspectedShard
from batchline.domain.states import TERMINAL, BatchStatus, FileState, ShardState, Stop
from batchline.domain.usage import Usage, total
from batchline.fsck.findings import Finding, Fix, Kind
from batchline.ports import InspectedBatch

_UNFINISHED = (ShardState.OPEN, ShardState.LEASED, ShardState.WITHHELD)
_TIMES = {
    BatchStatus.VALIDATING: (),
    BatchStatus.IN_PROGRESS: ("in_progress_at",),
    BatchStatus.FINALIZING: ("in_progress_at", "finalizing_at"),
    BatchStatus.COMPLETED: ("in_progress_at", "finalizing_at", "completed_at"),
    BatchStatus.FAILED: ("failed_at",),
    BatchStatus.EXPIRED: ("in_progress_at", "expired_at"),
    BatchStatus.CANCELLING: ("in_progress_at", "cancelling_at"),
    BatchStatus.CANCELLED: ("cancelling_at", "cancelled_at"),
}
"""The times that a batch must have in each state, in their order."""
_ENDS = ("completed_at", "failed_at", "expired_at", "cancelled_at")
_BY_HAND = "No command can tell what it should be. Compare the row with that of a backup."


def is_active(batch: Batch) -> bool:
    """Return whether a batch has shards and has not ended."""
    return batch.status not in TERMINAL and batch.status is not BatchStatus.VALIDATING


def recorded_usage(shards: Sequence[InspectedShard]) -> Usage:
    """Return the tokens that the shards of a batch count."""
    return total([shard.usage for shard in shards])


def settle_usage(rows: InspectedBatch, counted: Usage, *, found: Usage) -> Usage:
    """Return the tokens of a batch whose rows count ``counted`` and whose results have ``found``.

    If the ledger has booked what the rows count, that is right: both were written when the lines were recorded, and the
    version that did so may have read the usage of an answer in another way than this one does.
    """
    return counted if counted == rows.booked_usage else found


def broken_rules(rows: InspectedBatch) -> Iterator[Finding]:
    """Yield what is wrong with the rows of a batch, without a look at its objects."""
    yield from _times(rows.batch)
    yield from _stop(rows.batch)
    yield from _shards(rows)
    yield from _drained(rows)
    yield from _leases(rows)
    if rows.unclaimable and is_active(rows.batch):
        yield Finding(
            kind=Kind.LANE,
            batch=rows.batch.id,
            problem=(
                f"{len(rows.unclaimable)} of its shards should run, but no worker finds them: their lane is closed, or "
                "they are withheld although the batch is not held"
            ),
            next="Their lines do not run until they are opened: run with --repair.",
            fix=Fix.OPEN_LANES,
        )


def _times(batch: Batch) -> Iterator[Finding]:
    def state(problem: str) -> Finding:
        return Finding(kind=Kind.STATE, batch=batch.id, problem=problem, next=_BY_HAND)

    required = _TIMES[batch.status]
    absent = [name for name in required if getattr(batch, name) is None]
    if absent:
        yield state(f"it is {batch.status}, but has no {absent[0]}")
    times = [("created_at", batch.created_at), *((name, getattr(batch, name)) for name in required)]
    known = [(name, at) for name, at in times if at is not None]
    for (before, first), (after, second) in pairwise(known):
        if second < first:
            yield Finding(
                kind=Kind.STATE,
                batch=batch.id,
                problem=f"its {after} is before its {before}",
                next="Run with --repair: it is moved to the same moment.",
                fix=Fix.CORRECT_TIMES,
            )
    for name in _ENDS:
        if getattr(batch, name) is not None and name not in required:
            yield state(f"it is {batch.status}, but has a {name}")


def _stop(batch: Batch) -> Iterator[Finding]:
    problem = None
    if batch.status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED) and batch.stop is None:
        problem = f"it is {batch.status}, but was never stopped"
    if batch.status is BatchStatus.EXPIRED and batch.stop is not Stop.EXPIRED:
        problem = "it is expired, but was not stopped for that reason"
    if problem:
        yield Finding(kind=Kind.STATE, batch=batch.id, problem=problem, next=_BY_HAND)


def _shards(rows: InspectedBatch) -> Iterator[Finding]:
    batch = rows.batch
    if batch.status in TERMINAL and any(shard.state in _UNFINISHED for shard in rows.shards):
        yield Finding(
            kind=Kind.STATE,
            batch=batch.id,
            problem=f"it is {batch.status}, but has shards that could still run",
            next="Their lines may run again and cost money, but change no result: run with --repair to close them.",
            fix=Fix.CLOSE_SHARDS,
        )
    for shard in rows.shards:
        size = (shard.lines + 7) // 8
        if len(shard.settled) != size or (shard.state is ShardState.DONE and unsettled(shard.settled, shard.lines)):
            yield Finding(
                kind=Kind.STATE,
                batch=batch.id,
                shard=shard.n,
                problem=f"shard {shard.n} is {shard.state}, but its bitmap does not fit its {shard.lines} lines",
                next=(
                    "The finalizer finds that the counts disagree, and repairs the batch."
                    if is_active(batch)
                    else "The batch has ended, so nothing depends on it."
                ),
                fix=Fix.HAND_OVER if is_active(batch) else None,
            )


def _drained(rows: InspectedBatch) -> Iterator[Finding]:
    unfinished = any(shard.state in _UNFINISHED for shard in rows.shards)
    if not is_active(rows.batch) or rows.drained is not unfinished:
        return
    if unfinished:
        problem, next_step = "it counts as drained, but has shards that can run", "It would be finalized too early"
    else:
        problem, next_step = "no shard of it can run any more, but it does not count as drained", "It would never end"
    yield Finding(
        kind=Kind.STATE,
        batch=rows.batch.id,
        problem=problem,
        next=f"{next_step}: run with --repair.",
        fix=Fix.CORRECT_DRAINED,
    )


def _leases(rows: InspectedBatch) -> Iterator[Finding]:
    for shard in rows.shards:
        if (shard.state is ShardState.LEASED) is not (shard.owner is not None) and shard.state in _UNFINISHED:
            yield Finding(
                kind=Kind.LEASE,
                batch=rows.batch.id,
                shard=shard.n,
                problem=f"shard {shard.n} is {shard.state}, but has {'an' if shard.owner else 'no'} owner",
                next="Perhaps no worker takes it. Run with --repair: it is closed, and repaired with its batch.",
                fix=Fix.HAND_OVER if is_active(rows.batch) else Fix.CLOSE_SHARDS,
            )
    if rows.batch.status is BatchStatus.VALIDATING and rows.owner is None:
        yield Finding(
            kind=Kind.LEASE,
            batch=rows.batch.id,
            problem="it is being validated, but no process holds it",
            next="It never starts by itself. Cancel it, and create it again.",
        )


def wrong_usage(rows: InspectedBatch, *, completed: int, usage: Usage) -> Iterator[Finding]:
    """Yield a finding unless the ledger has booked exactly the lines that succeeded, with their tokens."""
    if (rows.booked_requests, rows.booked_usage) != (completed, usage):
        booked, used = tokens(rows.booked_usage), tokens(usage)
        yield Finding(
            kind=Kind.USAGE,
            batch=rows.batch.id,
            problem=(
                f"its ledger entries have {rows.booked_requests} requests with {booked} tokens, "
                f"its results {completed} with {used}"
            ),
            next=(
                "What was charged is not changed by a repair, since prices may have changed. Compare it with "
                "`batchline usage --by batch`, and correct it with `batchline orgs set-balance`."
            ),
        )


def wrong_result_rows(rows: InspectedBatch) -> Iterator[Finding]:
    """Yield what is wrong with the result files that an ended batch names, without a look at their objects."""
    batch = rows.batch
    for name, file_id, lines, is_error in (
        ("output", batch.output_file_id, batch.completed, False),
        ("error", batch.error_file_id, batch.failed, True),
    ):
        problem = None
        if file_id is None:
            if lines:
                problem = f"it has {lines} lines for an {name} file, but names none"
        elif (file := rows.files.get(file_id)) is None:
            problem = f"its {name} file {file_id} has no row"
        elif file.state not in (FileState.STORED, FileState.DELETED, FileState.EXPIRED):
            problem = f"its {name} file {file_id} is {file.state}"
        elif file.is_error is not is_error or file.project_id != batch.project_id:
            problem = f"its {name} file {file_id} is a file of something else"
        if problem:
            yield Finding(kind=Kind.RESULT, batch=batch.id, file=file_id, problem=problem, next=_BY_HAND)


def tokens(usage: Usage) -> str:
    """Return tokens for a message."""
    return (
        f"{usage.input_tokens} input ({usage.cached_tokens} cached) and {usage.output_tokens} output "
        f"({usage.reasoning_tokens} reasoning)"
    )
