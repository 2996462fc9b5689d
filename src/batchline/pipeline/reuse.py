"""Gives lines of a batch answers that the project got before, so that they need not run (G7).

A batch that was created with ``reuse`` starts with all of its shards *following*: no worker claims them, and the batch
counts as drained. So the finalizer leases it, and takes a step of the reuse instead of finalizing it:

- **Lookup.** The digest of each line is looked for in the indexes of earlier batches of the project, newest first. An
  index is made when it is first needed. Lines with an answer are recorded with a copy of it. Of the others, the first
  with each digest may run, and those equal to it go on following.
- **Follow.** When the lines that ran are recorded, the others take their answers. If there is none, they run, unless
  the batch was stopped.

A step writes segments first. Then one fenced transaction records all of its lines, as a repair does. So a crash at any
moment leaves nothing to undo, and another process takes the step again.
"""

import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import count
from pathlib import Path

from msgspec import Struct
from msgspec.json import encode as encode_json

from batchline.domain.bitmap import all_but, unsettled
from batchline.domain.chat import named_model
from batchline.domain.checksum import Checksum, checksum_of
from batchline.domain.errors import Damaged, LeaseLost, ObjectMissing, StoreDown
from batchline.domain.estimates import estimated_usage
from batchline.domain.limits import InputLimits
from batchline.domain.lines import lines_of
from batchline.domain.models import Catalog, Model
from batchline.domain.money import NANO, Price, Tariff
from batchline.domain.records import Batch, Charge, NewShard, Segment, Shard
from batchline.domain.result_lines import index_of, read_result_line, split_lines
from batchline.domain.result_order import encode_layout
from batchline.domain.reuse import (
    LineDigests,
    Place,
    Source,
    StoredIndex,
    answer_of,
    copied_line,
    encode_index,
    find_in_index,
    is_reused,
    models_with_rules,
    place_of,
    sending_rules,
)
from batchline.domain.states import Reuse
from batchline.domain.usage import NOTHING
from batchline.pipeline.record import INLINE_SEGMENT_BYTES
from batchline.pipeline.segments import read_segment, stored_segments
from batchline.ports import DividedShard, FinalizeLease, Objects, ReuseChanges, Store, StoreClock, Validator
from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_SEGMENT_BYTES = 4 * 1024 * 1024
_READ_BYTES = 1024 * 1024
_MAX_GAP_BYTES = 64 * 1024
"""Answers that are no further apart are read at once."""
_INLINE_INDEX_BYTES = 16 * 1024
_MAX_SOURCES = 256
"""The most batches that one lookup searches. Each may need a read of its index and one of its answers."""
_FAILURES_TO_SKIP = 6
"""The number of failures of a batch, in about a minute, after which an earlier batch whose answers cannot be read is
left out. Its files may never be readable again, and the lines can run."""
_MAX_TRIES = 3
"""The number of tries if results are deleted during a lookup. In the last one nothing is looked up: the lines run."""


class _Line(Struct, frozen=True, gc=False):
    """A line that waits for an answer."""

    shard: int
    position: int
    index: int
    custom_id: bytes
    digest: bytes
    model: str
    price: Price


class _Copies:
    """The copies of answers that a step has made. Full segments are written at once."""

    def __init__(self, leased: FinalizeLease, *, objects: Objects, names: "count[int]") -> None:
        self._batch, self._owner = leased.batch, leased.owner
        self._objects, self._names = objects, names
        self._lines: list[bytes] = []
        self._indexes: list[int] = []
        self._bytes = 0
        self._batch_name = leased.batch.id.removeprefix("batch_").encode()
        self._charges: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        self.segments: list[Segment] = []
        self.charges: list[Charge] = []
        self.settled: defaultdict[int, set[int]] = defaultdict(set)
        """The positions of the lines that took an answer, by shard."""

    async def add(self, lines: Sequence[_Line], answer: bytes, *, saved: int) -> None:
        """Add copies of an answer as the results of equal lines."""
        end, charged = answer_of(answer), self._charges[lines[0].model]
        for line in lines:
            copy = copied_line(self._batch_name, line.index, line.custom_id, end)
            self._lines.append(copy)
            self._indexes.append(line.index)
            self._bytes += len(copy)
            charged[0] += 1
            charged[1] += saved
            self.settled[line.shard].add(line.position)
            if self._bytes >= _SEGMENT_BYTES:
                await self.flush()
                charged = self._charges[line.model]

    async def flush(self) -> None:
        """Write a segment of the copies that were added since the last one."""
        if not self._lines:
            return
        data, key = b"".join(self._lines), None
        if len(data) >= INLINE_SEGMENT_BYTES:
            key = f"segments/{self._batch.id}/{self._owner}-reuse-{next(self._names)}"
            await self._objects.put(key, data)
        charges = [
            Charge(model=model, requests=0, usage=NOTHING, cost=0, reused=lines, saved=saved)
            for model, (lines, saved) in self._charges.items()
        ]
        self.charges += charges
        self.segments.append(
            Segment(
                output_bytes=len(data),
                error_bytes=0,
                object_key=key,
                data=data if key is None else None,
                lines=len(self._lines),
                checksum=checksum_of(data),
                charges=encode_json(charges),
                layout=encode_layout(self._indexes, self._lines),
            )
        )
        self._lines, self._indexes, self._bytes = [], [], 0
        self._charges.clear()


class ReuseStep:
    """Takes the next step of a batch that was created with ``reuse``.

    Answers older than ``max_age_seconds`` are not used, and at most ``max_lines`` of them are searched.
    """

    def __init__(
        self,
        *,
        store: Store,
        objects: Objects,
        validator: Validator,
        catalog: Catalog,
        tariff: Tariff,
        clock: StoreClock,
        metrics: Metrics,
        max_age_seconds: int,
        max_lines: int,
    ) -> None:
        self._store, self._objects, self._validator, self._clock = store, objects, validator, clock
        self._catalog, self._tariff, self._metrics = catalog, tariff, metrics
        self._max_age_seconds, self._max_lines = max_age_seconds, max_lines
        self._names = count(1)

    async def run(self, leased: FinalizeLease) -> None:
        """Take a step, and end the lease. Raise LeaseLost, Damaged or ObjectMissing."""
        for tries_left in reversed(range(_MAX_TRIES)):
            lines = await self._read_waiting(leased)
            copies = _Copies(leased, objects=self._objects, names=self._names)
            sources: list[str] = []
            if leased.batch.reuse is Reuse.FOLLOW:
                await self._copy_own(leased, lines, copies)
            elif tries_left:
                sources = await self._copy_earlier(leased, lines, copies)
            await copies.flush()
            follows = leased.batch.reuse is Reuse.LOOKUP
            changes = ReuseChanges(
                shards=_divide(leased.following, lines, copies, follows=follows),
                segments=copies.segments,
                charges=copies.charges,
                sources=sources,
            )
            if await self._store.end_reuse_step(leased, changes, at=int(self._clock.now())):
                self._report(leased.batch, changes)
                return

    def _report(self, batch: Batch, changes: ReuseChanges) -> None:
        reused = sum(charge.reused for charge in changes.charges)
        self._metrics.lines.labels("succeeded").inc(reused)
        self._metrics.reused_lines.inc(reused)
        self._metrics.saved_units.inc(sum(charge.saved for charge in changes.charges) / NANO)
        log.info("answers reused", extra={"batch": batch.id, "lines": reused, "step": batch.reuse})

    async def _read_waiting(self, leased: FinalizeLease) -> list[_Line]:
        """Return the lines that wait, except those that must be refused or cannot be read. These run.

        Raise LeaseLost if the database has lost the batch.
        """
        batch = leased.batch
        signals = await self._store.signals([batch.id])
        if not signals:
            raise LeaseLost(batch.id)
        if signals[0].key_revoked:
            return []
        rules = sending_rules(self._catalog, {shard.model for shard in leased.following}, batch.project_id)
        digests = LineDigests(batch.project_id, batch.endpoint, rules)
        found: list[_Line] = []
        for shard in leased.following:
            positions = set(unsettled(shard.settled, shard.lines))
            try:
                lines = lines_of(shard, await self._objects.read(leased.work_key, shard.offset, shard.length))
            except (Damaged, ObjectMissing):
                continue
            shared_model = self._catalog.find(shard.model, batch.project_id) if shard.model else None
            for position, line in enumerate(lines):
                if position not in positions:
                    continue
                model = shared_model if shard.model else self._find_model(line.body, batch)
                if model is not None:
                    digest = digests.of(shard.model, line.body)
                    found.append(_Line(shard.n, position, line.index, line.custom_id, digest, model.id, model.price))
            await self._clock.sleep(0)
        return found

    def _find_model(self, body: bytes, batch: Batch) -> Model | None:
        name = named_model(body)
        return self._catalog.find(name, batch.project_id) if name else None

    async def _copy_earlier(self, leased: FinalizeLease, lines: list[_Line], copies: _Copies) -> list[str]:
        """Copy answers of earlier batches, and return the files that they are from."""
        batch = leased.batch
        wanted = _by_digest(lines)
        now, searched, used = int(self._clock.now()), 0, list[str]()
        sources = await self._store.reuse_sources(
            batch.project_id,
            endpoint=batch.endpoint,
            since=now - self._max_age_seconds,
            at=int(self._clock.due()),
            limit=_MAX_SOURCES,
        )
        for source in sources:
            searched += source.completed
            if not wanted or searched > self._max_lines:
                break
            try:
                places = find_in_index(await self._index_of(batch, source), wanted)
                if places:
                    # It counts as used even if only some copies can be made: the file may be deleted meanwhile.
                    used.append(source.output_file_id)
                    await self._copy_places(source, places, wanted, copies)
            except (Damaged, ObjectMissing) as error:
                self._report_unusable(source, error)
                await self._store.drop_index(source.batch_id)
            except StoreDown:
                raise
            except Exception as error:
                if leased.failures < _FAILURES_TO_SKIP:
                    raise
                self._report_unusable(source, error)
            await self._clock.sleep(0)
        return used

    def _report_unusable(self, source: Source, error: Exception) -> None:
        log.warning(
            "answers of a batch cannot be reused, going on without them",
            extra={"batch": source.batch_id, "reason": str(error)},
        )

    async def _copy_places(
        self, source: Source, places: dict[bytes, Place], wanted: dict[bytes, list[_Line]], copies: _Copies
    ) -> None:
        """Copy answers from an output file, in the order of the file. Raise Damaged or ObjectMissing."""
        ordered = sorted(places.items(), key=_offset_of)
        for group in _adjacent(ordered):
            start = group[0][1].offset
            end = group[-1][1].offset + group[-1][1].length
            data = await self._objects.read(source.output_key, start, end - start)
            for digest, (offset, length, checksum) in group:
                answer = data[offset - start : offset - start + length]
                if checksum_of(answer) != checksum:
                    raise Damaged(source.output_key)
                lines = wanted.pop(digest)
                await copies.add(lines, answer, saved=self._saved(lines[0], answer))

    def _saved(self, line: _Line, answer: bytes) -> int:
        """Return the cost that an answer would have had."""
        if not self._tariff.metered or line.price.is_zero:
            return 0
        read = read_result_line(answer)
        usage = read.usage or NOTHING
        if usage == NOTHING:
            usage = estimated_usage(request=b"", answer_bytes=read.answer_bytes)
        return self._tariff.cost(line.price, usage, synchronous=False)

    async def _index_of(self, batch: Batch, source: Source) -> bytes:
        """Return the index of a batch, and make it if there is none. Raise Damaged or ObjectMissing."""
        if source.index_bytes is None:
            return await self._make_index(batch, source)
        data = source.index_data
        if data is None and source.index_key is not None:
            data = await self._objects.read(source.index_key, 0, source.index_bytes)
        if data is None or len(data) != source.index_bytes or checksum_of(data) != source.index_checksum:
            raise Damaged(f"the index of {source.batch_id}")
        return data

    async def _make_index(self, batch: Batch, source: Source) -> bytes:
        digests = await self._digests_of(batch, source)
        if digests is None:
            return b""
        entries = [
            (digests[16 * index : 16 * index + 16], place)
            async for index, place in self._answers(source)
            if 16 * index < len(digests)
        ]
        data = encode_index(entries)
        index = StoredIndex(lines=len(entries), size=len(data), checksum=checksum_of(data), data=data)
        if len(data) > _INLINE_INDEX_BYTES:
            key = f"results/{source.batch_id}/{batch.id}-{next(self._names)}-index"
            await self._objects.put(key, data)
            index = StoredIndex(lines=len(entries), size=len(data), checksum=checksum_of(data), object_key=key)
        if not await self._store.add_index(source.batch_id, index) and index.object_key is not None:
            await self._objects.delete(index.object_key)
        return data

    async def _answers(self, source: Source) -> AsyncIterator[tuple[int, Place]]:
        """Yield the index and the place of each line of an output file that was not reused itself. Raise Damaged."""
        read, rest, offset = Checksum(), b"", 0
        async for chunk in self._objects.stream(source.output_key, 0, source.output_bytes):
            read.update(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            for text in lines:
                line = text + b"\n"
                if not is_reused(line):
                    yield index_of(line), place_of(line, offset)
                offset += len(line)
            await self._clock.sleep(0)
        if read.bytes != source.output_bytes or source.output_checksum not in (None, read.value):
            raise Damaged(source.output_key)

    async def _digests_of(self, batch: Batch, source: Source) -> bytes | None:
        """Return the digests of all lines of a batch, in the order of its input; None if its lines are not known."""
        if source.work_key is not None:
            shards = await self._store.batch_shards(source.batch_id)
            pieces = {shard.offset: shard for shard in shards}
            try:
                async with self._objects.local(source.work_key) as work:
                    return await self._digest(batch, source, work, _new_shards(pieces.values()))
            except (ObjectMissing, Damaged):
                pass
        file = await self._store.file(batch.project_id, source.input_file_id, at=int(self._clock.due()))
        if file is None:
            return None
        limits = InputLimits.to_repeat(
            size=file.bytes,
            lines=source.total,
            endpoint=source.endpoint,
            own_shards=models_with_rules(source.sent_as),
        )
        async with self._objects.local(file.object_key) as local, self._objects.scratch() as work:
            verdict = await self._validator.validate(
                project_id=batch.project_id, source=local, work=work, endpoint=source.endpoint, limits=limits
            )
            if verdict.faults:
                return None
            return await self._digest(batch, source, work, verdict.shards)

    async def _digest(self, batch: Batch, source: Source, work: Path, shards: list[NewShard]) -> bytes:
        return await self._validator.digests(
            project_id=batch.project_id, work=work, shards=shards, endpoint=source.endpoint, sent_as=source.sent_as
        )

    async def _copy_own(self, leased: FinalizeLease, lines: list[_Line], copies: _Copies) -> None:
        """Copy the answers of those lines of the same batch that ran. Raise Damaged or ObjectMissing."""
        wanted = _by_digest(lines)
        leaders = await self._find_leaders(leased, lines)
        async for segment in stored_segments(self._store, leased.batch.id):
            if not wanted:
                break
            for answer in await self._output_of(segment):
                lines = wanted.pop(leaders.get(index_of(answer), b""), [])
                if lines:
                    await copies.add(lines, answer, saved=self._saved(lines[0], answer))
            await self._clock.sleep(0)

    async def _find_leaders(self, leased: FinalizeLease, lines: Sequence[_Line]) -> dict[int, bytes]:
        """Return the lines that do not wait and that others wait for: their digests, by index."""
        batch = leased.batch
        waiting, wanted = {line.index for line in lines}, {line.digest for line in lines}
        shards = {shard.offset: shard for shard in await self._store.batch_shards(batch.id)}
        rules = sending_rules(self._catalog, {shard.model for shard in shards.values()}, batch.project_id)
        digests = LineDigests(batch.project_id, batch.endpoint, rules)
        leaders: dict[int, bytes] = {}
        for shard in shards.values():
            try:
                found = lines_of(shard, await self._objects.read(leased.work_key, shard.offset, shard.length))
            except (Damaged, ObjectMissing):
                continue
            for line in found:
                digest = digests.of(shard.model, line.body)
                if digest in wanted and line.index not in waiting:
                    leaders[line.index] = digest
            await self._clock.sleep(0)
        return leaders

    async def _output_of(self, segment: Segment) -> list[bytes]:
        """Return the output lines of a segment. Raise Damaged or ObjectMissing."""
        if segment.is_emptied:
            return []
        data = await read_segment(self._objects, segment)
        return split_lines(data[: segment.output_bytes])


def _offset_of(found: tuple[bytes, Place]) -> int:
    return found[1].offset


def _by_digest(lines: Iterable[_Line]) -> dict[bytes, list[_Line]]:
    found: dict[bytes, list[_Line]] = {}
    for line in lines:
        found.setdefault(line.digest, []).append(line)
    return found


def _new_shards(shards: Iterable[Shard]) -> list[NewShard]:
    return [
        NewShard(
            offset=shard.offset, length=shard.length, lines=shard.lines, model=shard.model, checksum=shard.checksum
        )
        for shard in shards
    ]


def _adjacent(places: Sequence[tuple[bytes, Place]]) -> list[list[tuple[bytes, Place]]]:
    """Return places in groups that are read at once."""
    groups: list[list[tuple[bytes, Place]]] = []
    start = end = 0
    for found in places:
        offset, length, _ = found[1]
        if groups and offset <= end + _MAX_GAP_BYTES and offset + length - start <= _READ_BYTES:
            groups[-1].append(found)
        else:
            groups.append([found])
            start = offset
        end = offset + length
    return groups


def _divide(shards: Sequence[Shard], lines: Sequence[_Line], copies: _Copies, *, follows: bool) -> list[DividedShard]:
    """Return the new state of each shard. If ``follows``, of equal lines without an answer only the first may run."""
    following: dict[int, set[int]] = {}
    seen: set[bytes] = set()
    for line in lines if follows else ():
        if line.position in copies.settled.get(line.shard, ()):
            continue
        if line.digest in seen:
            following.setdefault(line.shard, set()).add(line.position)
        seen.add(line.digest)
    divided = []
    for shard in shards:
        copied, waiting = copies.settled.get(shard.n, set()), following.get(shard.n, set())
        running = [at for at in unsettled(shard.settled, shard.lines) if at not in copied and at not in waiting]
        divided.append(
            DividedShard(
                n=shard.n,
                completed=len(copied),
                done=all_but((), shard.lines),
                settled=all_but(running, shard.lines) if running else None,
                following=all_but(waiting, shard.lines) if waiting else None,
            )
        )
    return divided
