"""What a database that went back to an earlier state accepts: nothing that was decided by what it lost (C12, D5)."""

import pytest

from batchline.domain.bitmap import unsettled
from batchline.domain.errors import LeaseLost
from batchline.domain.records import Charge, RepairedShard, Segment
from batchline.domain.states import BatchStatus, Reuse, ShardState
from batchline.domain.usage import Usage
from batchline.ports import RepairChanges, ReuseChanges
from tests.support.stores import DAY, LEASE, ME, NOW, OTHER, World, key, moved_on, segment

pytestmark = pytest.mark.anyio

ONE_LINE_AGAIN = RepairChanges(
    shards=[RepairedShard(n=0, settled=b"\x0e", completed=3, failed=0, state=ShardState.OPEN)],
    removed={},
    lost=[],
    added=[],
    errors=[],
)
"""The repair of a shard of four lines, of which one runs again."""


@pytest.mark.rule("C12", "A record is void if the database lost what its worker recorded before.")
async def test_a_record_on_lost_progress_is_void(world: World) -> None:
    """D5: else the bits of lines would be set that no segment has: 595 of 600, and no end."""
    batch = await world.running(shards=[8])
    (shard,) = await world.claim()
    go_back = await world.remember()
    later = await world.record(shard, [0, 1, 2])
    await go_back()
    with pytest.raises(LeaseLost):
        await world.record(later, [3, 4])
    (held,) = await world.store.held_shards(batch.id, owner=ME)
    assert (key(held), held.settled) == (key(shard), shard.settled)
    assert ((await world.seen(batch)).completed, await world.store.segments(batch.id, after=0, limit=9)) == (0, [])
    await world.record_all([held])
    assert (await world.publish(await world.finish()), (await world.seen(batch)).completed) == ("completed", 8)


@pytest.mark.rule("C12", "Of two workers with the same epoch of a shard, only its owner records.")
async def test_a_worker_whose_lease_was_lost_records_and_releases_nothing(world: World) -> None:
    """D5: the database forgot the first claim, and gave the same epoch to another worker: 11 of 8 lines."""
    batch = await world.running(shards=[8])
    go_back = await world.remember()
    (mine,) = await world.claim(holder=ME)
    await go_back()
    (theirs,) = await world.claim(holder=OTHER)
    assert key(mine) == key(theirs)
    _, progress = moved_on(mine, [0, 1, 2])
    with pytest.raises(LeaseLost):
        await world.store.record(batch.id, owner=ME, progress=[progress], segment=segment(3), at=NOW)
    await world.store.release(batch.id, owner=ME, shards=[(mine.n, mine.epoch)])
    await world.store.close_shard(batch.id, mine.n, epoch=mine.epoch, owner=ME)
    assert await world.store.renew_shards(owner=ME, lease=LEASE) == set()
    await world.store.record(
        batch.id, owner=OTHER, progress=[moved_on(theirs, range(8))[1]], segment=segment(8), at=NOW
    )
    assert (await world.seen(batch)).completed == 8


@pytest.mark.rule("C12", "Of two finalizers with the same epoch of a batch, only its owner publishes.")
async def test_a_finalizer_whose_lease_was_lost_publishes_nothing(world: World) -> None:
    batch = await world.running(shards=[4])
    await world.record_all(await world.claim())
    go_back = await world.remember()
    mine = await world.finish(holder=ME)
    await go_back()
    theirs = await world.finish(holder=OTHER)
    assert mine.epoch == theirs.epoch
    for attempt in (
        world.publish(mine),
        world.store.defer_finalize(mine, seconds=1),
        world.store.repair_batch(mine, RepairChanges(shards=[], removed={}, lost=[], added=[], errors=[]), at=NOW),
    ):
        with pytest.raises(LeaseLost):
            await attempt
    assert await world.publish(theirs) is BatchStatus.COMPLETED
    assert (await world.seen(batch)).completed == 4


@pytest.mark.rule("C12", "A process that holds a batch which the database lost has lost its lease.")
async def test_a_batch_that_the_database_lost_is_a_lost_lease(world: World) -> None:
    """D5: such a process drops what it had, as if another one held the batch."""
    owner = await world.owner()
    go_back = await world.remember()
    following = await world.running(owner, shards=[4], reuse=Reuse.LOOKUP)
    reusing_lease = await world.finish()
    batch = await world.running(owner, shards=[4, 4])
    await world.record_all(await world.claim(lines=8))
    lease = await world.finish()
    await go_back()
    nothing = RepairChanges(shards=[], removed={}, lost=[], added=[], errors=[])
    for attempt in (
        world.store.renew_batch(following.id, epoch=reusing_lease.epoch, owner=ME, lease=LEASE),
        world.store.end_reuse_step(reusing_lease, ReuseChanges(shards=[], segments=[], charges=[], sources=[]), at=NOW),
        world.store.defer_finalize(lease, seconds=1),
        world.store.repair_batch(lease, nothing, at=NOW),
        world.publish(lease),
    ):
        with pytest.raises(LeaseLost):
            await attempt
    assert await world.store.signals([following.id, batch.id]) == []


async def test_shards_that_the_database_lost_are_neither_released_nor_closed(world: World) -> None:
    """D5: a worker gives up what it no longer holds, which is no error."""
    owner = await world.owner()
    go_back = await world.remember()
    batch = await world.running(owner, shards=[4])
    (shard,) = await world.claim()
    await go_back()
    await world.store.release(batch.id, owner=ME, shards=[(shard.n, shard.epoch)])
    await world.store.close_shard(batch.id, shard.n, epoch=shard.epoch, owner=ME)
    assert await world.store.batch_shards(batch.id) == []


@pytest.mark.rule("C12", "The lines of a lost segment are open again, and what was charged for them is given back.")
async def test_a_repair_reopens_lines_and_gives_their_charges_back(world: World) -> None:
    """The ledger still adds up to the balance and the credits, and the usage to the lines that have results."""
    owner = await world.owner()
    await world.store.set_funds(owner.organization_id, balance=100, credits=5, at=NOW)
    batch = await world.running(owner, shards=[4])
    (shard,) = await world.claim()
    charges = b'[{"model":"m","requests":2,"usage":{"input_tokens":6,"output_tokens":8},"cost":20}]'
    charge = Charge(model="m", requests=2, cost=20, usage=Usage(input_tokens=6, output_tokens=8))
    for positions in ([0, 1], [2, 3]):
        shard, progress = moved_on(shard, positions)
        lost = Segment(output_bytes=2, error_bytes=0, data=b"++", lines=2, checksum=7, charges=charges)
        await world.store.record(batch.id, owner=ME, progress=[progress], segment=lost, charges=[charge], at=NOW)
    leased = await world.finish()
    first, _ = await world.store.segments(batch.id, after=0, limit=9)
    repaired = RepairedShard(
        n=0, settled=b"\x0c", completed=2, failed=0, usage=Usage(input_tokens=6, output_tokens=8), state=ShardState.OPEN
    )
    changes = RepairChanges(shards=[repaired], removed={first.id: None}, lost=[first.id], added=[], errors=[])
    await world.store.repair_batch(leased, changes, at=NOW)
    seen = await world.seen(batch)
    assert (seen.status, seen.completed, seen.input_tokens) == (BatchStatus.FINALIZING, 2, 6)
    (organization,) = await world.store.organizations()
    assert (organization.balance, organization.credits) == (85, 0)
    entries = await world.store.entries(owner.organization_id)
    assert [sum(each.balance for each in entries), sum(each.credits for each in entries)] == [85, 0]
    (usage,) = await world.store.usage(since=0, until=NOW + DAY)
    assert (usage.requests, usage.input_tokens, usage.cost) == (2, 6, 20)
    (again,) = await world.claim()
    assert (again.settled, again.epoch) == (b"\x0c", shard.epoch + 2)
    await world.record_all([again])
    assert (await world.publish(await world.finish()), (await world.seen(batch)).completed) == ("completed", 4)


@pytest.mark.rule("C11", "A batch that is finalizing with lines to run again stops at the end of its window.")
async def test_lines_that_run_again_stop_at_the_end_of_the_window(world: World) -> None:
    batch = await world.running(shards=[4])
    await world.record_all(await world.claim())
    leased = await world.finish()
    await world.store.repair_batch(leased, ONE_LINE_AGAIN, at=NOW)
    assert await world.expire(at=batch.expires_at) == [batch.id]
    assert await world.claim() == []
    assert await world.publish(await world.finish(at=batch.expires_at)) is BatchStatus.COMPLETED


@pytest.mark.rule("C10", "A batch that is cancelled while it is repaired runs no line again.")
async def test_a_batch_that_is_cancelled_while_it_is_repaired_runs_no_line_again(world: World) -> None:
    batch = await world.running(shards=[4])
    await world.record_all(await world.claim())
    leased = await world.finish()
    await world.store.cancel_batch(batch.project_id, batch.id, at=NOW + 100)
    await world.store.repair_batch(leased, ONE_LINE_AGAIN, at=NOW)
    assert await world.claim() == []
    finish = await world.finish()
    assert [unsettled(left.settled, left.lines) for left in finish.leftovers] == [[0]]
    assert await world.publish(finish) is BatchStatus.CANCELLED


@pytest.mark.rule("F3", "batches fail stops a batch, and its lines that have no result fail.")
async def test_a_batch_that_is_ended_by_hand_runs_no_more(world: World) -> None:
    batch = await world.running(shards=[4, 4])
    (shard,) = await world.claim(lines=1)
    await world.record(shard, [0])
    stopped = await world.store.stop_failed(batch.id)
    assert stopped is not None
    assert (stopped.status, stopped.stop) == (BatchStatus.IN_PROGRESS, "failed")
    assert await world.claim() == []
    await world.store.release(batch.id, owner=ME, shards=[(shard.n, shard.epoch)])
    leased = await world.finish()
    assert (leased.batch.status, len(leased.leftovers)) == (BatchStatus.FINALIZING, 2)
    assert await world.publish(leased) is BatchStatus.COMPLETED
    assert await world.store.stop_failed(batch.id) == await world.seen(batch)
    assert await world.store.stop_failed("batch_of_nobody") is None


async def test_a_batch_that_failed_to_be_finalized_comes_after_the_others(world: World) -> None:
    """However early its window ends. It is not taken at all before its time."""
    first = await world.running(shards=[1], expires_at=NOW + 10)
    second = await world.running(shards=[1], expires_at=NOW + 20)
    await world.record_all(await world.claim())
    broken = await world.finish()
    assert broken.batch.id == first.id
    await world.store.defer_finalize(broken, seconds=100)
    healthy = await world.finish()
    assert (healthy.batch.id, await world.store.lease_finalizable(owner=ME, lease=LEASE, at=NOW)) == (second.id, None)
    await world.pass_time(101)
    again = await world.finish()
    assert (again.batch.id, again.failures) == (second.id, 0)
    assert (await world.finish()).failures == 1
