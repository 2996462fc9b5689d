"""All segments of a batch are read, in the order in which they were recorded, however many there are."""

import pytest

from batchline.pipeline.segments import stored_segments
from tests.support.stores import World

pytestmark = pytest.mark.anyio


async def test_more_segments_than_a_page_has_are_read_in_order(world: World) -> None:
    owner = await world.owner()
    batch, other = await world.running(owner, shards=[1] * 100), await world.running(owner, shards=[1] * 10)
    while shards := await world.claim():
        await world.record_all(shards)
    for read, count in ((batch, 100), (other, 10)):
        ids = [segment.id async for segment in stored_segments(world.store, read.id)]
        assert len(ids) == count
        assert ids == sorted(set(ids))
