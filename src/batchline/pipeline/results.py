"""Reads the results of a batch in the order in which they were recorded, also while the batch runs.

While the batch runs, its lines are read from its segments, and afterwards from its two files, by the order that was
stored with them (``domain/result_order.py``). A cursor that was given out for a segment stays valid: the order names
the segment that each part of the files came from. All bytes that are read are compared with their checksum.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from enum import StrEnum
from typing import NamedTuple, Protocol

from msgspec import Struct

from batchline.domain.checksum import checksum_of
from batchline.domain.errors import (
    BatchNotFound,
    Damaged,
    FileDamaged,
    InvalidRequest,
    ObjectMissing,
    ResultsUnavailable,
)
from batchline.domain.records import Batch, File, Segment
from batchline.domain.result_lines import index_of, split_lines
from batchline.domain.result_order import (
    Cursor,
    MovedLine,
    OrderBuilder,
    OrderedPart,
    ResultOrder,
    decode_layout,
    size_of,
)
from batchline.domain.states import TERMINAL
from batchline.pipeline.damage import DamageLog
from batchline.pipeline.segments import read_segment
from batchline.ports import Objects, Results, ResultsSnapshot, StoreClock

_SEGMENTS_PER_PAGE = 32
_PART_BYTES = 1024 * 1024
"""The size of the parts that files written by an earlier version are divided into. Memory holds one part at a time."""
_FIRST_ERROR_PART = 1 << 40
"""The number of the first part of such an error file. It does not depend on the output file, which may be deleted."""

_UNKNOWN_SIZE = 1 << 60
"""Stands for the size of an emptied segment that an earlier version recorded, without a layout."""


class LineStatus(StrEnum):
    """Whether a line is in the output file or in the error file."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"


class PlacedResult(NamedTuple):
    """A line of a result file with its line end, and the cursor behind it."""

    cursor: Cursor
    line: bytes


class ResultReader:
    """Opens the results of batches."""

    def __init__(self, *, store: Results, objects: Objects, clock: StoreClock, damage_log: DamageLog) -> None:
        self._store, self._objects, self._clock, self._damage_log = store, objects, clock, damage_log

    async def open(self, project_id: str, batch_id: str, *, after: Cursor, status: LineStatus | None) -> "ResultStream":
        """Return the results of a batch behind a cursor: all of them, or those of one status.

        Raise BatchNotFound, ResultsUnavailable, or InvalidRequest if the cursor is not one of this batch.
        """
        source = self._source(project_id, batch_id, status)
        found = await source.load(after, passed=after.segment - 1)
        return ResultStream(source, found, after=after, damage_log=self._damage_log)

    async def read_segments(self, project_id: str, batch_id: str, offsets: Mapping[int, int]) -> list[bytes]:
        """Return the lines of some segments, each from an offset on. Lines that a repair has lost are left out.

        Raise BatchNotFound, ResultsUnavailable or FileDamaged.
        """
        source = self._source(project_id, batch_id, None)
        lines: list[bytes] = []
        wanted = sorted(offsets)
        while wanted:
            found = await source.load(Cursor(wanted[0], 0), passed=wanted[0] - 1)
            parts = {part.id: part for part in found.parts}
            for segment in (each for each in wanted if each in parts):
                lines += [placed.line for placed in await _read_part(parts[segment], offsets[segment])]
            wanted = [each for each in wanted[1:] if each not in parts]
        return lines

    def _source(self, project_id: str, batch_id: str, status: LineStatus | None) -> "_Source":
        return _Source(
            store=self._store,
            objects=self._objects,
            clock=self._clock,
            project_id=project_id,
            batch_id=batch_id,
            status=status,
        )


async def _read_part(part: "_Part", offset: int) -> list[PlacedResult]:
    try:
        return await part.read(offset) or []
    except (ObjectMissing, Damaged) as error:
        raise FileDamaged(part.place) from error


class ResultStream:
    """The results of one batch behind a cursor. It holds the lines of one segment at a time."""

    def __init__(self, source: "_Source", found: "_Found", *, after: Cursor, damage_log: DamageLog) -> None:
        self._source, self._damage_log = source, damage_log
        self._cursor = after
        self._passed = after.segment - 1
        """The last segment that has no line behind the cursor."""
        self._parts = deque(found.parts)
        self.batch = found.batch
        """The batch as it was last read from the store."""
        self.ended = found.is_end
        """Whether the batch is terminal and all its lines were returned."""

    async def read(self) -> list[PlacedResult]:
        """Return the lines of the next segment that has any, or none if no more are recorded now.

        Raise ResultsUnavailable, FileDamaged, or InvalidRequest if the cursor is not one of this batch.
        """
        unreadable: int | None = None
        while self._parts or await self._load():
            part = self._parts.popleft()
            try:
                lines = await part.read(self._cursor.offset if part.id == self._cursor.segment else 0)
            except (ObjectMissing, Damaged) as error:
                self._parts.clear()
                # The batch may have ended meanwhile, or its files may have been deleted, so load the parts again, once.
                if unreadable == part.id:
                    return self._on_damage(part, error)
                unreadable = part.id
                continue
            if lines is None:
                self._parts.clear()
                return []
            self._cursor, self._passed = Cursor(part.id, part.size), part.id
            if lines:
                return lines
        return []

    async def _load(self) -> bool:
        """Find the parts behind the cursor, and return whether there are any."""
        if self.ended:
            return False
        found = await self._source.load(self._cursor, passed=self._passed)
        self.batch, self.ended = found.batch, found.is_end
        self._parts.extend(found.parts)
        return bool(found.parts)

    def _on_damage(self, part: "_Part", error: Exception) -> list[PlacedResult]:
        """Wait for the repair of a running batch. The files of a terminal one stay as they are."""
        if self.batch.status in TERMINAL:
            self._damage_log.report("file", batch=self.batch.id, key=part.place, offset=0)
            raise FileDamaged(part.place) from error
        self._damage_log.report("segment", batch=self.batch.id, key=part.place)
        return []


class _Part(Protocol):
    """The lines of one segment."""

    id: int
    size: int

    @property
    def place(self) -> str:
        """The place of its bytes, for the log."""

    async def read(self, offset: int) -> list[PlacedResult] | None:
        """Return the lines from a byte on, or None if they do not exist yet. Raise ObjectMissing or Damaged."""


class _Found(NamedTuple):
    batch: Batch
    parts: list[_Part]

    @property
    def is_end(self) -> bool:
        """Whether the batch is terminal and has no further lines."""
        return self.batch.status in TERMINAL and not self.parts


class _Source(Struct, frozen=True, kw_only=True):
    """Finds the parts of one batch, in its segments or in its files."""

    store: Results
    objects: Objects
    clock: StoreClock
    project_id: str
    batch_id: str
    status: LineStatus | None

    async def load(self, after: Cursor, *, passed: int) -> _Found:
        """Return the parts that have lines behind a cursor; of a running batch, the next few."""
        found = await self.store.results(
            self.project_id,
            self.batch_id,
            after=passed,
            limit=_SEGMENTS_PER_PAGE,
            at=int(self.clock.due()),
        )
        if found is None:
            raise BatchNotFound(self.batch_id)
        parts = await self._file_parts(found, after) if found.batch.status in TERMINAL else self._segment_parts(found)
        return _Found(found.batch, [part for part in parts if not _is_passed(part, after)])

    def _segment_parts(self, found: ResultsSnapshot) -> list[_Part]:
        moved = frozenset(line.index for layout in found.emptied for line in decode_layout(layout))
        return [_SegmentPart(segment, self.objects, moved, self.status) for segment in found.segments]

    async def _file_parts(self, found: ResultsSnapshot, after: Cursor) -> list[_Part]:
        files = self._files(found)
        if not files:
            return []
        order = await self._order(found, files)
        if after.segment and not any(part.segment == after.segment for part in order.parts):
            raise _unknown_cursor()
        moved = {line.index: line for line in order.moved}
        parts: list[_Part] = []
        output_at = error_at = 0
        for part in order.parts:
            if part.segment >= after.segment:
                parts.append(_FilePart(part, output_at, error_at, files, self.objects, moved, self.status))
            output_at, error_at = output_at + part.output_bytes, error_at + part.error_bytes
        return parts

    def _files(self, found: ResultsSnapshot) -> dict[LineStatus, File]:
        """Return the files that hold the wanted lines. Raise ResultsUnavailable if one of them was removed."""
        named = {LineStatus.SUCCEEDED: found.batch.output_file_id, LineStatus.FAILED: found.batch.error_file_id}
        files = {}
        for status, file_id in named.items():
            if file_id is not None and self.status in (None, status):
                if file_id not in found.files:
                    raise ResultsUnavailable(self.batch_id)
                files[status] = found.files[file_id]
        return files

    async def _order(self, found: ResultsSnapshot, files: dict[LineStatus, File]) -> ResultOrder:
        """Return the order of the files. Those that an earlier version wrote get one when they are first read."""
        if found.order is not None:
            return ResultOrder.decode(found.order)
        builder = OrderBuilder()
        if LineStatus.SUCCEEDED in files:
            await self._divide(files[LineStatus.SUCCEEDED], builder, is_error=False)
        if LineStatus.FAILED in files:
            await self._divide(files[LineStatus.FAILED], builder, is_error=True)
        order = builder.finish()
        if self.status is None:
            await self.store.add_order(self.batch_id, order.encode())
        return order

    async def _divide(self, file: File, builder: OrderBuilder, *, is_error: bool) -> None:
        """Divide a file into parts that end with a line."""
        number = _FIRST_ERROR_PART if is_error else 1
        part = b""
        async for chunk in self.objects.stream(file.object_key, 0, file.bytes):
            part += chunk
            end = part.rfind(b"\n") + 1
            if end >= _PART_BYTES:
                _add_part(builder, number, part[:end], is_error=is_error)
                number, part = number + 1, part[end:]
        if part:
            _add_part(builder, number, part, is_error=is_error)


def _add_part(builder: OrderBuilder, number: int, data: bytes, *, is_error: bool) -> None:
    builder.add(
        number,
        output_bytes=0 if is_error else len(data),
        error_bytes=len(data) if is_error else 0,
        checksum=checksum_of(data),
    )


def _is_passed(part: _Part, after: Cursor) -> bool:
    """Return whether a cursor is behind all lines of a part. Raise InvalidRequest if it is beyond its end."""
    if part.id == after.segment and after.offset > part.size:
        raise _unknown_cursor()
    return Cursor(part.id, part.size) <= after


def _unknown_cursor() -> InvalidRequest:
    return InvalidRequest("after names no place in the results of this batch", param="after")


class _SegmentPart:
    """A segment of a running batch."""

    def __init__(self, segment: Segment, objects: Objects, moved: frozenset[int], status: LineStatus | None) -> None:
        self.id, self.place = segment.id, segment.place
        self._emptied = list(decode_layout(segment.layout or b"")) if segment.is_emptied else []
        self.size = _size(segment.output_bytes + segment.error_bytes, segment.layout)
        self._segment, self._objects, self._moved, self._status = segment, objects, moved, status

    async def read(self, offset: int) -> list[PlacedResult] | None:
        """Return the lines from a byte on, or None if a repair lost them and they did not run again yet."""
        if any(line.start >= offset for line in self._emptied):
            return None
        segment = self._segment
        start, end = _wanted(segment.output_bytes, segment.error_bytes, self._status)
        if max(start, offset) >= end:
            return []
        data = await read_segment(self._objects, segment)
        start = max(start, offset)
        return list(_placed_lines(self.id, data[start:end], start, self._moved, before=data[:offset]))


class _FilePart:
    """The lines of one segment in the files of a terminal batch."""

    def __init__(
        self,
        part: OrderedPart,
        output_at: int,
        error_at: int,
        files: dict[LineStatus, File],
        objects: Objects,
        moved: dict[int, MovedLine],
        status: LineStatus | None,
    ) -> None:
        self.id = part.segment
        self._placed = list(decode_layout(part.layout or b""))
        self.size = _size(part.output_bytes + part.error_bytes, part.layout)
        self._part, self._output_at, self._error_at = part, output_at, error_at
        self._files, self._objects, self._moved, self._status = files, objects, moved, status

    @property
    def place(self) -> str:
        return " and ".join(file.id for file in self._files.values())

    async def read(self, offset: int) -> list[PlacedResult]:
        """Return the lines from a byte on."""
        if self._placed:
            return await self._read_moved(offset)
        part = self._part
        start, end = _wanted(part.output_bytes, part.error_bytes, self._status)
        if max(start, offset) >= end:
            return []
        data = await self._read(LineStatus.SUCCEEDED, self._output_at, part.output_bytes)
        data += await self._read(LineStatus.FAILED, self._error_at, part.error_bytes)
        if end - start == self.size and checksum_of(data) != part.checksum:
            raise Damaged(self.place)
        skipped = max(0, offset - start)
        return list(_placed_lines(self.id, data[skipped:], start + skipped, self._moved, before=data[:skipped]))

    async def _read(self, status: LineStatus, offset: int, length: int) -> bytes:
        if not length or self._status not in (None, status):
            return b""
        data = await self._objects.read(self._files[status].object_key, offset, length)
        if len(data) < length:
            raise Damaged(self.place)
        return data

    async def _read_moved(self, offset: int) -> list[PlacedResult]:
        lines = []
        for placed in self._placed:
            moved = self._moved.get(placed.index)
            if moved is None or placed.start < offset:
                continue
            status = LineStatus.FAILED if moved.is_error else LineStatus.SUCCEEDED
            if line := await self._read(status, moved.offset, moved.length):
                lines.append(PlacedResult(Cursor(self.id, placed.end), line))
        return lines


def _size(size: int, layout: bytes | None) -> int:
    """Return the size of a segment, before a repair emptied it if one did."""
    return size or (size_of(layout) if layout else _UNKNOWN_SIZE)


def _wanted(output_bytes: int, error_bytes: int, status: LineStatus | None) -> tuple[int, int]:
    """Return where the wanted lines of a segment begin and end."""
    start = output_bytes if status is LineStatus.FAILED else 0
    end = output_bytes if status is LineStatus.SUCCEEDED else output_bytes + error_bytes
    return start, end


def _placed_lines(
    segment: int, data: bytes, offset: int, moved: Collection[int], *, before: bytes
) -> Iterator[PlacedResult]:
    """Yield the lines of a segment from an offset on, except those whose place is in another segment."""
    if before and not before.endswith(b"\n"):
        raise _unknown_cursor()
    for line in split_lines(data):
        offset += len(line)
        if not moved or index_of(line) not in moved:
            yield PlacedResult(Cursor(segment, offset), line)
