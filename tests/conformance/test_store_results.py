"""Where results are, in every store: rules G2 to G4."""

import asyncio

import pytest

from batchline.domain.records import Batch, RepairedShard, Segment, Shard
from batchline.domain.result_order import encode_layout
from batchline.domain.states import BatchStatus, ShardState
from batchline.ports import RepairChanges, ResultsSnapshot
from tests.support.stores import DAY, ME, NOW, World, moved_on, segment

pytestmark = pytest.mark.anyio


async def _results(world: World, batch: Batch, *, after: int = 0, limit: int = 99, at: int = NOW) -> ResultsSnapshot:
    found = await world.store.results(batch.project_id, batch.id, after=after, limit=limit, at=at)
    assert found is not None
    return found


async def _record(world: World, shard: Shard, position: int, *, holder: str = ME) -> Shard:
    after, progress = moved_on(shard, [position])
    part = Segment(
        output_bytes=1, error_bytes=0, data=b"%d" % (position % 10), layout=encode_layout([position], [b"1"])
    )
    await world.store.record(shard.batch_id, owner=holder, progress=[progress], segment=part, at=NOW)
    return after


async def test_the_segments_of_a_running_batch_are_read_in_pages(world: World) -> None:
    batch = await world.running(shards=[4])
    (shard,) = await world.claim()
    for position in range(3):
        shard = await _record(world, shard, position)
    found = await _results(world, batch)
    assert (found.batch.status, found.batch.completed) == (BatchStatus.IN_PROGRESS, 3)
    assert [part.data for part in found.segments] == [b"0", b"1", b"2"]
    assert [part.layout for part in found.segments] == [encode_layout([n], [b"1"]) for n in range(3)]
    first, second, third = (part.id for part in found.segments)
    assert first < second < third
    assert [part.id for part in (await _results(world, batch, after=first, limit=1)).segments] == [second]
    assert (found.order, found.files, found.emptied) == (None, {}, [])


async def test_another_projects_results_do_not_exist(world: World) -> None:
    """A8"""
    batch, other = await world.running(), await world.owner("other")
    assert await world.store.results(other.project_id, batch.id, after=0, limit=9, at=NOW) is None
    assert await world.store.lineage(other.project_id, batch.id) is None


@pytest.mark.rule(
    "G2", "Segments of several workers become visible in the order of their numbers: a reader misses none."
)
async def test_a_reader_misses_no_segment_of_many_workers(world: World) -> None:
    """Each worker records its own shard; a number that is given out early must not become visible late."""
    workers, lines = 6, 25
    batch = await world.running(shards=[lines] * workers)
    shards = [(await world.claim(holder=f"worker {n}", lines=1))[0] for n in range(workers)]

    async def work(shard: Shard, holder: str) -> None:
        for position in range(lines):
            shard = await _record(world, shard, position, holder=holder)

    seen: list[int] = []

    async def read() -> None:
        while len(seen) < workers * lines:
            found = await _results(world, batch, after=seen[-1] if seen else 0, limit=7)
            seen.extend(part.id for part in found.segments)
            if found.batch.completed == workers * lines and not found.segments:
                break

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        for n, shard in enumerate(shards):
            group.create_task(work(shard, f"worker {n}"))
    assert len(seen) == len(set(seen)) == workers * lines
    assert seen == sorted(seen)


async def test_the_results_of_a_terminal_batch_are_in_its_files(world: World) -> None:
    owner = await world.owner()
    batch = await world.ended(owner)
    found = await _results(world, batch)
    assert (found.order, found.segments) == (b"order", [])
    assert set(found.files) == {batch.output_file_id, batch.error_file_id}
    await world.store.delete_work(batch.id)
    assert await _results(world, batch) == found
    await world.store.delete_file(owner.project_id, batch.output_file_id or "", at=NOW)
    assert set((await _results(world, batch)).files) == {batch.error_file_id}


async def test_the_order_is_deleted_when_its_files_expire(world: World) -> None:
    owner = await world.owner()
    kept = await world.ended(owner)
    batch = await world.ended(owner, expires_at=NOW + 50)
    assert (await _results(world, batch, at=NOW + 50)).files == {}
    await world.stored(owner, expires_at=NOW + 50)
    assert len(await world.expire_files(owner=ME, at=NOW + DAY, limit=99)) == 3
    assert (await _results(world, batch)).order is None
    assert (await _results(world, kept)).order == b"order"


async def test_the_order_is_deleted_with_the_last_of_its_files(world: World) -> None:
    """B8: the file that is left is still read in its order."""
    owner = await world.owner()
    kept, batch = await world.ended(owner), await world.ended(owner)
    await world.store.delete_file(owner.project_id, batch.error_file_id or "", at=NOW)
    assert (await _results(world, batch)).order == b"order"
    await world.store.delete_file(owner.project_id, batch.output_file_id or "", at=NOW)
    assert (await _results(world, batch)).order is None
    assert (await _results(world, kept)).order == b"order"


async def test_an_order_is_stored_once(world: World) -> None:
    batch = await world.running()
    await world.store.add_order(batch.id, b"first")
    await world.store.add_order(batch.id, b"second")
    await world.record_all(await world.claim())
    await world.publish(await world.finish())
    assert (await _results(world, batch)).order == b"first"


@pytest.mark.rule("G2", "A segment that a repair empties keeps its number and the places of its lines.")
async def test_an_emptied_segment_keeps_its_place(world: World) -> None:
    batch = await world.running(shards=[4])
    (shard,) = await world.claim()
    for position in range(4):
        shard = await _record(world, shard, position)
    parts = (await _results(world, batch)).segments
    layout = encode_layout([3], [b"1"])
    repaired = RepairedShard(n=0, settled=b"\x07", completed=3, failed=0, state=ShardState.OPEN)
    changes = RepairChanges(
        shards=[repaired], removed={parts[3].id: layout, parts[1].id: None}, lost=[], added=[segment(1)], errors=[]
    )
    await world.store.repair_batch(await world.finish(), changes, at=NOW)
    found = await _results(world, batch)
    assert [part.id for part in found.segments[:4]] == [part.id for part in parts]
    assert found.segments[4].id > parts[3].id
    assert [part.is_emptied for part in found.segments] == [False, True, False, True, False]
    assert found.emptied == [layout]
    assert (found.segments[3].data, found.segments[3].lines, found.segments[3].charges) == (None, 0, None)


@pytest.mark.rule("G4", "A lineage has all batches that ran failed lines again, in the order of their creation.")
async def test_a_lineage_is_in_the_order_of_creation(world: World) -> None:
    owner = await world.owner()
    root = await world.running(owner)
    first = await world.running(owner, parent_batch_id=root.id)
    grandchild = await world.running(owner, parent_batch_id=first.id)
    second = await world.running(owner, parent_batch_id=root.id)
    await world.running(owner)
    lineage = await world.store.lineage(owner.project_id, root.id) or []
    assert [batch.id for batch in lineage] == [root.id, first.id, grandchild.id, second.id]
    assert [batch.parent_batch_id for batch in lineage] == [None, root.id, first.id, root.id]
    snapshot = await world.store.snapshot(owner.project_id, root.id)
    assert snapshot is not None
    assert snapshot.child_batch_ids == [first.id, second.id]


async def test_the_work_of_a_batch_is_known_until_it_is_deleted(world: World) -> None:
    batch = await world.running(shards=[4, 2])
    work = await world.store.work_of(batch.id)
    assert work is not None
    assert (work.key, [shard.lines for shard in work.shards]) == (f"work/{batch.id}/1", [4, 2])
    await world.record_all(await world.claim())
    await world.publish(await world.finish())
    await world.store.delete_work(batch.id)
    assert await world.store.work_of(batch.id) is None
