"""Batches that reuse answers, and limits of their cost, in every store: rules G7 and G8."""

import pytest

from batchline.domain.bitmap import all_but, unsettled
from batchline.domain.errors import LeaseLost
from batchline.domain.progress import LineErrors
from batchline.domain.records import Balances, Batch, Charge, Shard
from batchline.domain.reuse import StoredIndex
from batchline.domain.states import BatchStatus, Hold, Reuse
from batchline.domain.usage import NOTHING, Usage
from batchline.ports import DividedShard, FinalizeLease, ReuseChanges
from tests.support.stores import CHAT, DAY, ME, NOW, World, moved_on, segment

pytestmark = pytest.mark.anyio

SAVED = Charge(model="m", requests=0, usage=NOTHING, cost=0, reused=3, saved=30)


def divided(shard: Shard, *, copied: list[int], running: list[int], following: list[int]) -> DividedShard:
    return DividedShard(
        n=shard.n,
        completed=len(copied),
        done=all_but((), shard.lines),
        settled=all_but(running, shard.lines) if running else None,
        following=all_but(following, shard.lines) if following else None,
    )


async def leased(world: World) -> FinalizeLease:
    found = await world.store.lease_finalizable(owner=ME, lease=30, at=NOW)
    assert found is not None
    return found


async def looked_up(world: World) -> Batch:
    """Create a batch of which three lines took an answer, three may run, and two follow."""
    batch = await world.running(shards=[4, 4], reuse=Reuse.LOOKUP)
    assert await world.claim() == []
    lease = await leased(world)
    assert [shard.lines for shard in lease.following] == [4, 4]
    assert (lease.batch.status, lease.batch.reuse) == (BatchStatus.IN_PROGRESS, Reuse.LOOKUP)
    first, second = lease.following
    changes = ReuseChanges(
        shards=[
            divided(first, copied=[0, 1], running=[2], following=[3]),
            divided(second, copied=[0], running=[1, 3], following=[2]),
        ],
        segments=[segment(3)],
        charges=[SAVED],
        sources=[],
    )
    assert await world.store.end_reuse_step(lease, changes, at=NOW)
    return await world.seen(batch)


@pytest.mark.rule("G7", "Lines that took an answer are recorded before any line runs.")
async def test_only_lines_without_an_answer_can_be_claimed(world: World) -> None:
    batch = await looked_up(world)
    assert (batch.completed, batch.reuse) == (3, Reuse.FOLLOW)
    snapshot = await world.store.snapshot(batch.project_id, batch.id)
    assert snapshot is not None
    assert (snapshot.bill.reused, snapshot.bill.saved, snapshot.bill.cost) == (3, 30, 0)
    claimed = await world.claim()
    assert [unsettled(shard.settled, shard.lines) for shard in claimed] == [[2], [1, 3]]
    assert await world.store.lease_finalizable(owner=ME, lease=30, at=NOW) is None


async def test_a_step_that_another_process_took_is_a_lost_lease(world: World) -> None:
    """Also if the answer to the commit was lost, and the same process tries again."""
    await world.running(shards=[2], reuse=Reuse.LOOKUP)
    lease = await leased(world)
    changes = ReuseChanges(
        shards=[divided(lease.following[0], copied=[], running=[0, 1], following=[])],
        segments=[],
        charges=[],
        sources=[],
    )
    assert await world.store.end_reuse_step(lease, changes, at=NOW)
    with pytest.raises(LeaseLost):
        await world.store.end_reuse_step(lease, changes, at=NOW)


async def test_lines_that_follow_are_looked_at_when_the_others_are_recorded(world: World) -> None:
    batch = await looked_up(world)
    await world.record_all(await world.claim())
    lease = await leased(world)
    assert lease.batch.status is BatchStatus.IN_PROGRESS
    assert [unsettled(shard.settled, shard.lines) for shard in lease.following] == [[3], [2]]
    first, second = lease.following
    changes = ReuseChanges(
        shards=[
            divided(first, copied=[3], running=[], following=[]),
            divided(second, copied=[], running=[2], following=[]),
        ],
        segments=[segment(1)],
        charges=[],
        sources=[],
    )
    assert await world.store.end_reuse_step(lease, changes, at=NOW)
    [left] = await world.claim()
    assert unsettled(left.settled, left.lines) == [2]
    await world.record_all([left])
    lease = await leased(world)
    assert (lease.following, lease.leftovers, lease.batch.status) == ([], [], BatchStatus.FINALIZING)
    assert (await world.seen(batch)).completed == 8


@pytest.mark.parametrize("early", [False, True])
async def test_lines_that_may_find_no_answer_are_closed_with_their_batch(world: World, early: bool) -> None:
    """Before the lookup none of the lines can have an answer. ``batches fail`` waits for nothing."""
    if early:
        batch = await world.running(shards=[4, 4], reuse=Reuse.LOOKUP)
        await world.store.cancel_batch(batch.project_id, batch.id, at=NOW)
    else:
        batch = await looked_up(world)
        await world.record_all(await world.claim())
        await world.store.stop_failed(batch.id)
    lease = await leased(world)
    assert lease.following == []
    assert _left(lease) == (8 if early else 2)


@pytest.mark.rule("G7", "Lines of a batch that is stopped take the answer of an equal line that succeeded before.")
@pytest.mark.parametrize("expired", [False, True])
async def test_lines_of_a_stopped_batch_take_an_answer_or_do_not_run(world: World, expired: bool) -> None:
    batch = await looked_up(world)
    claimed = await world.claim()
    if expired:
        assert await world.expire(at=NOW + DAY + 1) == [batch.id]
    else:
        await world.store.cancel_batch(batch.project_id, batch.id, at=NOW)
    await world.record_all(claimed)
    lease = await leased(world)
    first, second = lease.following
    parts = [
        divided(first, copied=[3], running=[], following=[]),
        divided(second, copied=[], running=[2], following=[]),
    ]
    changes = ReuseChanges(shards=parts, segments=[segment(1)], charges=[], sources=[])
    assert await world.store.end_reuse_step(lease, changes, at=NOW)
    assert await world.claim() == []
    lease = await leased(world)
    assert (lease.following, _left(lease), lease.batch.completed) == ([], 1, 7)


def _left(lease: FinalizeLease) -> int:
    return sum(len(unsettled(shard.settled, shard.lines)) for shard in lease.leftovers)


async def test_a_step_that_ends_after_a_cancellation_changes_nothing(world: World) -> None:
    batch = await world.running(shards=[4], reuse=Reuse.LOOKUP)
    lease = await leased(world)
    await world.store.cancel_batch(batch.project_id, batch.id, at=NOW)
    [shard] = lease.following
    parts = [divided(shard, copied=[0, 1, 2, 3], running=[], following=[])]
    changes = ReuseChanges(shards=parts, segments=[segment(4)], charges=[SAVED], sources=[])
    assert await world.store.end_reuse_step(lease, changes, at=NOW)
    lease = await leased(world)
    assert (lease.batch.status, lease.batch.completed) == (BatchStatus.CANCELLING, 0)


async def test_a_step_whose_source_was_deleted_changes_nothing(world: World) -> None:
    await world.running(shards=[4], reuse=Reuse.LOOKUP)
    lease = await leased(world)
    [shard] = lease.following
    parts = [divided(shard, copied=[0, 1, 2, 3], running=[], following=[])]
    changes = ReuseChanges(shards=parts, segments=[segment(4)], charges=[], sources=["file-gone"])
    assert not await world.store.end_reuse_step(lease, changes, at=NOW)
    assert (await world.seen(lease.batch)).completed == 0


async def test_a_batch_with_a_hold_runs_its_trial_after_the_lookup(world: World) -> None:
    batch = await world.running(shards=[100] * 10, reuse=Reuse.LOOKUP, hold=Hold.TRIAL)
    lease = await leased(world)
    parts = [divided(shard, copied=[0], running=list(range(1, 100)), following=[]) for shard in lease.following]
    changes = ReuseChanges(shards=parts, segments=[segment(10)], charges=[], sources=[])
    assert await world.store.end_reuse_step(lease, changes, at=NOW)
    claimed = await world.claim()
    assert sum(len(unsettled(shard.settled, shard.lines)) for shard in claimed) == 64
    assert all(0 not in unsettled(shard.settled, shard.lines) for shard in claimed)
    assert (await world.seen(batch)).completed == 10


async def followed(world: World, *, failed: bool) -> tuple[Batch, FinalizeLease]:
    """Create a batch with a hold of which 30 lines ran and 970 follow, and lease it for the next step."""
    batch = await world.running(shards=[100] * 10, reuse=Reuse.LOOKUP, hold=Hold.TRIAL)
    lease = await leased(world)
    parts = [divided(shard, copied=[], running=[0, 1, 2], following=list(range(3, 100))) for shard in lease.following]
    changes = ReuseChanges(shards=parts, segments=[], charges=[], sources=[])
    assert await world.store.end_reuse_step(lease, changes, at=NOW)
    for shard in await world.claim():
        _, progress = moved_on(shard, [0, 1, 2], failed=3 if failed else 0)
        await world.store.record(
            batch.id,
            owner=ME,
            progress=[progress],
            segment=segment(3, failed=3 if failed else 0),
            errors=[LineErrors(code="invalid_request_error", count=3, sample=b"{}")] if failed else [],
            at=NOW,
        )
    return await world.seen(batch), await leased(world)


@pytest.mark.rule("G6", "After the trial all lines may start, also those that had waited for equal ones.")
async def test_lines_that_followed_run_after_the_trial(world: World) -> None:
    """The trial is over when they stop following, so nothing would let them run if they were withheld for it."""
    batch, lease = await followed(world, failed=False)
    assert batch.hold is Hold.WATCHING
    parts = [
        divided(shard, copied=list(range(3, 50)), running=list(range(50, 100)), following=[])
        for shard in lease.following
    ]
    changes = ReuseChanges(shards=parts, segments=[segment(470)], charges=[], sources=[])
    assert await world.store.end_reuse_step(lease, changes, at=NOW)
    claimed = await world.claim()
    assert sum(len(unsettled(shard.settled, shard.lines)) for shard in claimed) == 500
    await world.record_all(claimed)
    assert (await leased(world)).batch.status is BatchStatus.FINALIZING


@pytest.mark.rule("G6", "No line of a held batch starts, also none that had waited for equal ones.")
async def test_lines_that_followed_in_a_held_batch_run_when_it_is_released(world: World) -> None:
    batch, lease = await followed(world, failed=True)
    assert batch.hold is Hold.HELD
    parts = [divided(shard, copied=[], running=list(range(3, 100)), following=[]) for shard in lease.following]
    changes = ReuseChanges(shards=parts, segments=[], charges=[], sources=[])
    assert await world.store.end_reuse_step(lease, changes, at=NOW)
    assert await world.claim() == []
    assert await world.store.lease_finalizable(owner=ME, lease=30, at=NOW) is None
    released = await world.store.release_batch(batch.project_id, batch.id)
    assert released is not None
    assert released[1]
    assert sum(len(unsettled(shard.settled, shard.lines)) for shard in await world.claim()) == 970


async def test_an_index_is_stored_once(world: World) -> None:
    batch = await world.ended(await world.owner())
    index = StoredIndex(lines=1, size=3, checksum=7, data=b"abc")
    assert await world.store.add_index(batch.id, index)
    assert not await world.store.add_index(batch.id, index)
    await world.store.drop_index(batch.id)
    large = StoredIndex(lines=1, size=3, checksum=7, object_key="results/b/index")
    assert await world.store.add_index(batch.id, large)
    assert await world.store.referenced_keys(["results/b/index", "results/b/other"]) == {"results/b/index"}
    [source] = await world.store.reuse_sources(batch.project_id, endpoint=CHAT, since=0, at=NOW, limit=5)
    assert (source.batch_id, source.index_key) == (batch.id, "results/b/index")


async def test_a_batch_that_runs_is_no_source(world: World) -> None:
    batch = await world.running(shards=[4])
    assert await world.store.reuse_sources(batch.project_id, endpoint=CHAT, since=0, at=NOW, limit=5) == []


@pytest.mark.parametrize("expired", [False, True])
async def test_no_index_is_stored_after_its_output_file_was_removed(world: World, expired: bool) -> None:
    """A lookup may make an index while the file is removed. Nothing would ever delete it and its object."""
    batch = await world.ended(await world.owner())
    if expired:
        await world.expire_files(owner=ME, at=NOW + 31 * DAY, limit=10)
    else:
        await world.store.delete_file(batch.project_id, str(batch.output_file_id), at=NOW)
    index = StoredIndex(lines=1, size=3, checksum=7, object_key="results/b/index")
    assert not await world.store.add_index(batch.id, index)
    assert await world.store.referenced_keys(["results/b/index"]) == set()


@pytest.mark.rule("G8", "A record says what is left of the limit, and so do claims and signals.")
async def test_what_is_left_of_a_limit_of_the_cost(world: World) -> None:
    batch = await world.running(shards=[2, 2], max_cost=100)
    claim = await world.store.claim(owner=ME, lease=30, lines=2, bytes=1 << 30, alone=True, at=NOW)
    assert claim.batches[0].cost_left == 100
    [shard] = claim.shards
    _, progress = moved_on(shard, [0, 1])
    charge = Charge(model="m", requests=2, usage=Usage(input_tokens=1), cost=30)
    left = await world.store.record(
        batch.id, owner=ME, progress=[progress], segment=segment(2), charges=[charge], at=NOW
    )
    assert left == Balances(funds=-30, cost_left=70)
    [signal] = await world.store.signals([batch.id])
    assert (signal.cost_left, signal.funds) == (70, -30)
    claim = await world.store.claim(owner=ME, lease=30, lines=2, bytes=1 << 30, alone=True, at=NOW)
    assert claim.batches[0].cost_left == 70
    assert await world.store.cost_of_project(batch.project_id, since=NOW - NOW % 3600) == 30
    assert await world.store.cost_of_project(batch.project_id, since=NOW + 3600) == 0
