"""Reads the segments of a batch, and counts the lines of those that are intact."""

from dataclasses import dataclass, field

from batchline.domain.checksum import Checksum
from batchline.domain.errors import Damaged
from batchline.domain.records import Segment
from batchline.fsck.findings import Checked
from batchline.fsck.reading import ObjectReader, Unreadable
from batchline.fsck.tally import LineTally
from batchline.pipeline.segments import stored_segments
from batchline.ports import InspectedBatch, Store


@dataclass
class SegmentCheck:
    """The damaged segments of a batch, each with what is wrong, and the lines of the others."""

    tally: LineTally
    damaged: list[tuple[Segment, str]] = field(default_factory=list)


class SegmentReader:
    """Checks segments one at a time; none is larger than a few answers."""

    def __init__(self, store: Store, reader: ObjectReader, checked: Checked) -> None:
        self._store, self._reader, self._checked = store, reader, checked

    async def check(self, rows: InspectedBatch) -> SegmentCheck:
        """Read the segments that the batch had when its rows were read."""
        found = SegmentCheck(LineTally(rows.batch))
        wanted = {segment.id for segment in rows.segments}
        async for segment in stored_segments(self._store, rows.batch.id):
            if segment.id not in wanted:
                continue
            wanted.remove(segment.id)
            try:
                await self._count(segment, found.tally)
            except (Unreadable, Damaged) as error:
                found.damaged.append((segment, str(error)))
            self._checked.add(segments=1)
        # Rows that are gone were replaced by a repair, or deleted with the batch's work.
        found.damaged += [(segment, "has no row any more") for segment in rows.segments if segment.id in wanted]
        return found

    async def _count(self, segment: Segment, tally: LineTally) -> None:
        size = segment.output_bytes + segment.error_bytes
        data = segment.data or b""
        if segment.object_key is not None:
            # One byte more shows that an object is longer than it should be.
            data = await self._reader.read(segment.object_key, 0, size + 1)
        if len(data) != size:
            raise Unreadable(f"has {'more' if len(data) > size else 'fewer'} than the {size} bytes that were recorded")
        read = Checksum()
        read.update(data)
        try:
            segment.verify(read)
        except Damaged:
            raise Unreadable("is not what was recorded: its checksum differs") from None
        lines = [
            (line, is_error)
            for part, is_error in ((data[: segment.output_bytes], False), (data[segment.output_bytes :], True))
            for line in part.split(b"\n")
            if line
        ]
        if segment.lines not in (None, len(lines)):
            raise Unreadable(f"has {len(lines)} lines, but {segment.lines} were recorded")
        for line, is_error in lines:
            tally.add(line, is_error=is_error)
