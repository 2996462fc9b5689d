"""Repairs a batch whose stored data is damaged, so that it can be finalized.

The lines that can still be read from the segments count. The bitmaps, counts and tokens of the shards are set to these
lines. All other lines of the input that had a result are *lost*:

- A lost line runs again if its batch was not stopped, its window has not ended, and the batch was repaired less than
  three times before.
- Otherwise it is recorded as failed, with the code ``internal_error``. So every line is in the files once.
- A line that is in the segments twice is kept once.

A work file that cannot be read is made again from the input file, if that still exists. The finalizer holds the batch's
lease meanwhile, and no worker runs lines of it.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from batchline.domain import ids
from batchline.domain.bitmap import all_but, unsettled
from batchline.domain.checksum import Checksum, checksum_of
from batchline.domain.errors import Damaged, ObjectMissing, ObjectsDown
from batchline.domain.estimates import estimated_usage
from batchline.domain.limits import STRIKES, InputLimits
from batchline.domain.lines import Line, lines_of
from batchline.domain.outcomes import LOST, error_line
from batchline.domain.progress import LineErrors, count_errors
from batchline.domain.records import SHARED_LANE, Batch, RepairedShard, Segment, Shard
from batchline.domain.result_lines import ResultLine, read_result_line, split_lines
from batchline.domain.result_order import decode_layout, encode_layout, keep_places
from batchline.domain.states import ShardState, Stop
from batchline.domain.usage import NOTHING, Usage, total
from batchline.pipeline.damage import DamageLog
from batchline.pipeline.record import INLINE_SEGMENT_BYTES
from batchline.pipeline.segments import stored_segments
from batchline.pipeline.validation_pool import ValidationDied
from batchline.ports import FinalizeLease, Objects, RepairChanges, Store, StoreClock, Validator, Verdict

log = logging.getLogger(__name__)

_MAX_RERUNS = 3
"""After this number of repairs, lost lines do not run again, because each time costs an answer of the upstream."""
_FAILURES_TO_GIVE_UP = 6
"""The number of failures, in about a minute, after which an object of a batch past its window counts as lost. A single
call to an object store may fail at any time."""
_UNKNOWN_ID = b"null"


@dataclass
class _Results:
    """The readable results of a batch, and the changes to its segments."""

    found: dict[int, Usage | None] = field(default_factory=dict)
    """The usage of each line that has a result, by its index; None if the line failed."""
    unreported: dict[int, int] = field(default_factory=dict)
    """The sizes of answers that report no usage, by the index of their line."""
    errors: list[LineErrors] = field(default_factory=list)
    removed: list[Segment] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    added: list[Segment] = field(default_factory=list)
    placed: set[int] = field(default_factory=set)
    """The lines that have a place in the order of the results, in a segment that stays."""

    def emptied(self) -> dict[int, bytes | None]:
        """Return the segments to empty, each with the layout of the lines whose place it is."""
        placed, emptied = set(self.placed), dict[int, bytes | None]()
        for segment in self.removed:
            layout = segment.layout
            if layout is not None:
                own = {line.index for line in decode_layout(layout)} - placed
                placed |= own
                layout = keep_places(layout, own)
            emptied[segment.id] = layout
        return emptied


class _Group:
    """The shards of one part of the work file: one, or the pieces that it was split into. They share its lines."""

    def __init__(self, pieces: list[Shard], data: bytes) -> None:
        self.pieces = pieces
        self.lines: list[Line] | None
        try:
            self.lines = lines_of(pieces[0], data)
        except Damaged:
            self.lines = None
        self._open: dict[int, list[int]] = {}
        """The positions of lines that are open in each piece, by the number of the piece."""

    def divide(self, found: Mapping[int, Usage | None], *, runs_again: bool, stopped: bool) -> dict[int, bytes]:
        """Decide which lines without a result stay open, and return the index and custom_id of those that fail.

        Lines that never ran stay with their piece: they run, or the finalizer writes why they did not. A line whose
        result was lost goes to the first piece that may run.
        """
        lines = self.lines or []
        missing = {position for position, line in enumerate(lines) if line.index not in found}
        self._open = {
            piece.n: [at for at in unsettled(piece.settled, piece.lines) if at in missing] for piece in self.pieces
        }
        failing = sorted(missing.difference(*self._open.values()))
        runnable = [piece.n for piece in self.pieces if piece.strikes < STRIKES]
        if runs_again:
            self._open[(runnable or [self.pieces[0].n])[0]] += failing
            failing = []
        elif not stopped:
            for n in runnable:
                failing += self._open.pop(n)
        return {lines[position].index: lines[position].custom_id for position in failing}

    def repaired(self, found: Mapping[int, Usage | None], *, runs_again: bool) -> Iterator[RepairedShard]:
        """Yield the pieces as they are now. The first has the counts of all, since only their sum is used."""
        results = [found[line.index] for line in self.lines or [] if line.index in found]
        for piece in self.pieces:
            positions = self._open.get(piece.n, [])
            state = ShardState.DONE
            if positions:
                state = ShardState.OPEN if runs_again and piece.strikes < STRIKES else ShardState.CLOSED
            yield _repaired(piece, positions, state=state, results=results)
            results = []


class Repair:
    """Repairs batches that are leased to be finalized."""

    def __init__(
        self, *, store: Store, objects: Objects, validator: Validator, damage_log: DamageLog, clock: StoreClock
    ) -> None:
        self._store, self._objects, self._validator = store, objects, validator
        self._damage_log, self._clock = damage_log, clock

    async def run(self, leased: FinalizeLease) -> None:
        """Make the rows of a batch agree with its readable lines, and end the lease. Raise LeaseLost."""
        batch = leased.batch
        results = await self._read_results(leased)
        groups = await self._read_work(leased)
        results.found |= _estimates(groups, results.unreported)
        in_time = batch.stop is None and self._clock.due() < batch.expires_at
        runs_again = in_time and leased.repairs < _MAX_RERUNS
        failing: dict[int, bytes] = {}
        for group in groups:
            failing |= group.divide(results.found, runs_again=runs_again, stopped=batch.stop is not None)
        failing |= _lines_of_unreadable(batch, groups, results.found)
        if failing:
            lines = [error_line(ids.line_id(batch.id, index), custom_id, LOST) for index, custom_id in failing.items()]
            results.added.append(
                await self._new_segment(leased, results, output=[], errors=lines, indexes=list(failing))
            )
            results.errors += count_errors(lines)
            results.found |= dict.fromkeys(failing)
        shards = [shard for group in groups for shard in group.repaired(results.found, runs_again=runs_again)]
        changes = RepairChanges(
            shards=_count_rest(shards, groups, results.found),
            removed=results.emptied(),
            lost=results.lost,
            added=results.added,
            errors=results.errors,
        )
        await self._store.repair_batch(leased, changes, at=int(self._clock.now()))
        log.warning(
            "batch repaired",
            extra={
                "batch": batch.id,
                "segments_lost": len(results.lost),
                "lines_failed": len(failing),
                "lines_open": batch.total - len(results.found),
            },
        )

    async def gives_up_unreadable(self, leased: FinalizeLease) -> bool:
        """Return whether an object that cannot be read counts as lost, because the batch must end now.

        It counts as lost only after several tries, and only if the object store itself is available.
        """
        must_end = leased.batch.stop is Stop.FAILED or self._clock.due() >= leased.batch.expires_at
        if not must_end or leased.failures < _FAILURES_TO_GIVE_UP:
            return False
        try:
            await self._objects.check()
        except ObjectsDown:
            return False
        return True

    async def _read_results(self, leased: FinalizeLease) -> _Results:
        results = _Results()
        async for segment in stored_segments(self._store, leased.batch.id):
            await self._read_segment(leased, segment, results)
        return results

    async def _read_segment(self, leased: FinalizeLease, segment: Segment, results: _Results) -> None:
        if segment.is_emptied:
            results.placed |= {line.index for line in decode_layout(segment.layout or b"")}
            return
        data = segment.data or b""
        if segment.object_key is not None:
            data = await self._read(leased, segment.object_key, 0, segment.output_bytes + segment.error_bytes)
        read = Checksum()
        read.update(data)
        try:
            segment.verify(read)
            output = _parse_lines(data[: segment.output_bytes])
            errors = _parse_lines(data[segment.output_bytes :])
        except Damaged:
            self._damage_log.report("segment", batch=leased.batch.id, key=segment.place)
            results.removed.append(segment)
            results.lost.append(segment.id)
            return
        kept_output, kept_errors = _keep_new(output, results), _keep_new(errors, results)
        results.errors += count_errors([line for _, line in kept_errors])
        kept = kept_output + kept_errors
        if len(kept) == len(output) + len(errors):
            results.placed |= {index for index, _ in kept}
            return
        results.removed.append(segment)
        results.added.append(
            await self._new_segment(
                leased,
                results,
                output=[line for _, line in kept_output],
                errors=[line for _, line in kept_errors],
                indexes=[index for index, _ in kept],
                of=segment,
            )
        )

    async def _new_segment(
        self,
        leased: FinalizeLease,
        results: _Results,
        *,
        output: list[bytes],
        errors: list[bytes],
        indexes: list[int],
        of: Segment | None = None,
    ) -> Segment:
        """Store lines as a segment, with the charges of the segment that it replaces, if there is one."""
        output_bytes, data = sum(map(len, output)), b"".join([*output, *errors])
        key = None
        if len(data) >= INLINE_SEGMENT_BYTES:
            key = f"segments/{leased.batch.id}/{leased.owner}-repair-{leased.epoch}-{len(results.added)}"
            await self._objects.put(key, data)
        return Segment(
            output_bytes=output_bytes,
            error_bytes=len(data) - output_bytes,
            object_key=key,
            data=data if key is None else None,
            lines=len(output) + len(errors),
            checksum=checksum_of(data),
            charges=of.charges if of else None,
            layout=encode_layout(indexes, output + errors),
        )

    async def _read_work(self, leased: FinalizeLease) -> list[_Group]:
        """Read all shards from the work file; if some cannot be read, make the file again and read it once more."""
        shards = sorted(await self._store.batch_shards(leased.batch.id), key=lambda shard: (shard.offset, shard.n))
        groups = [await self._read_group(leased, pieces) for pieces in _by_offset(shards)]
        if all(group.lines is not None for group in groups) or not await self._make_work_file(leased, shards):
            return groups
        return [await self._read_group(leased, pieces) for pieces in _by_offset(shards)]

    async def _read_group(self, leased: FinalizeLease, pieces: list[Shard]) -> _Group:
        first = pieces[0]
        group = _Group(pieces, await self._read(leased, leased.work_key, first.offset, first.length))
        if group.lines is None:
            self._damage_log.report("shard", batch=leased.batch.id, key=leased.work_key, offset=first.offset)
        return group

    async def _read(self, leased: FinalizeLease, key: str, start: int, length: int) -> bytes:
        """Return a range of an object, or nothing if it is lost."""
        try:
            return await self._objects.read(key, start, length)
        except ObjectMissing:
            return b""
        except ObjectsDown:
            if await self.gives_up_unreadable(leased):
                return b""
            raise

    async def _make_work_file(self, leased: FinalizeLease, shards: list[Shard]) -> bool:
        """Make the work file again from the input file, and return whether it fits the shards of the batch."""
        batch = leased.batch
        file = await self._store.file(batch.project_id, batch.input_file_id, at=int(self._clock.due()))
        if file is None:
            return False
        limits = InputLimits.to_repeat(
            size=file.bytes,
            lines=batch.total,
            endpoint=batch.endpoint,
            own_shards={shard.model for shard in shards} - {SHARED_LANE},
        )
        try:
            async with self._objects.local(file.object_key) as source, self._objects.scratch() as work:
                verdict = await self._validator.validate(
                    project_id=batch.project_id, source=source, work=work, endpoint=batch.endpoint, limits=limits
                )
                if not _is_work_of(verdict, shards):
                    return False
                await self._objects.accept(work, leased.work_key)
        except ObjectMissing:
            return False
        except (ObjectsDown, ValidationDied):
            if await self.gives_up_unreadable(leased):
                return False
            raise
        return True


def _parse_lines(data: bytes) -> list[tuple[ResultLine, bytes]]:
    """Return each line, parsed and as bytes. Raise Damaged."""
    return [(read_result_line(line), line) for line in split_lines(data)]


def _keep_new(lines: Iterable[tuple[ResultLine, bytes]], results: _Results) -> list[tuple[int, bytes]]:
    """Return the lines that were not found before, with their indexes, and note them as found."""
    kept = []
    for read, line in lines:
        if read.index not in results.found:
            results.found[read.index] = read.usage
            if read.usage == NOTHING and not read.reused:
                results.unreported[read.index] = read.answer_bytes
            kept.append((read.index, line))
    return kept


def _estimates(groups: Iterable[_Group], unreported: Mapping[int, int]) -> dict[int, Usage]:
    """Return the usage that was charged for answers which report none, as far as their requests can be read."""
    lines = (line for group in groups for line in group.lines or [] if line.index in unreported)
    return {line.index: estimated_usage(request=line.body, answer_bytes=unreported[line.index]) for line in lines}


def _by_offset(shards: list[Shard]) -> Iterator[list[Shard]]:
    for _, pieces in groupby(shards, key=lambda shard: shard.offset):
        yield list(pieces)


def _is_work_of(verdict: Verdict, shards: list[Shard]) -> bool:
    made = {shard.offset: shard for shard in verdict.shards}
    return all(
        (new := made.get(shard.offset)) is not None
        and (new.length, new.lines) == (shard.length, shard.lines)
        and shard.checksum in (None, new.checksum)
        for shard in shards
    )


def _lines_of_unreadable(batch: Batch, groups: Iterable[_Group], found: Mapping[int, Usage | None]) -> dict[int, bytes]:
    """Return the index of lines that are in no readable shard and have no result, each with a custom_id of null.

    The readable part of a damaged shard is not used: a custom_id with a flipped bit may be that of another line.
    """
    known = found.keys() | {line.index for group in groups for line in group.lines or []}
    return dict.fromkeys((index for index in range(batch.total) if index not in known), _UNKNOWN_ID)


def _count_rest(
    shards: list[RepairedShard], groups: Iterable[_Group], found: Mapping[int, Usage | None]
) -> list[RepairedShard]:
    """Count the results of lines that are in no readable shard for the first unreadable one."""
    unreadable = [piece for group in groups if group.lines is None for piece in group.pieces]
    if not unreadable:
        return shards
    readable = {line.index for group in groups for line in group.lines or []}
    rest = [usage for index, usage in found.items() if index not in readable]
    counted = _repaired(unreadable[0], [], state=ShardState.DONE, results=rest)
    return [counted if shard.n == counted.n else shard for shard in shards]


def _repaired(piece: Shard, positions: list[int], *, state: ShardState, results: list[Usage | None]) -> RepairedShard:
    usages = [usage for usage in results if usage is not None]
    return RepairedShard(
        n=piece.n,
        settled=all_but(positions, piece.lines),
        completed=len(usages),
        failed=len(results) - len(usages),
        usage=total(usages),
        state=state,
    )
