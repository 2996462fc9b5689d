"""Reads the segments of a batch."""

from collections.abc import AsyncIterator

from batchline.domain.checksum import Checksum
from batchline.domain.records import Segment
from batchline.ports.objects import Objects
from batchline.ports.store import ShardStore

_SEGMENTS_PER_PAGE = 32


async def stored_segments(store: ShardStore, batch_id: str) -> AsyncIterator[Segment]:
    """Yield all segments of a batch, in the order in which they were recorded."""
    last = 0
    while page := await store.segments(batch_id, after=last, limit=_SEGMENTS_PER_PAGE):
        for segment in page:
            yield segment
        last = page[-1].id


async def read_segment(objects: Objects, segment: Segment) -> bytes:
    """Return the bytes of a segment: output lines first, then error lines. Raise Damaged or ObjectMissing."""
    data = segment.data or b""
    if segment.object_key is not None:
        data = await objects.read(segment.object_key, 0, segment.output_bytes + segment.error_bytes)
    read = Checksum()
    read.update(data)
    segment.verify(read)
    return data
