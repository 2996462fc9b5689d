"""Held batches in every store: rule G6."""

from collections.abc import Sequence

import pytest

from batchline.domain.bitmap import unsettled
from batchline.domain.progress import LineErrors
from batchline.domain.records import Batch, RepairedShard, Shard
from batchline.domain.states import BatchStatus, Hold, Reuse, ShardState
from batchline.ports import RepairChanges
from tests.support.stores import DAY, ME, NOW, OTHER, World, moved_on, segment

pytestmark = pytest.mark.anyio

SHARDS = [100] * 10


async def fail(world: World, shard: Shard, positions: Sequence[int], *, code: str = "invalid_request_error") -> Shard:
    """Record lines of a shard as failed."""
    after, progress = moved_on(shard, positions, failed=len(positions))
    await world.store.record(
        shard.batch_id,
        owner=world.holder(shard),
        progress=[progress],
        segment=segment(len(positions), failed=len(positions)),
        errors=[LineErrors(code=code, count=len(positions), sample=b'{"custom_id":"a","message":"no"}')],
        at=NOW,
    )
    return after


def lines_of(shards: Sequence[Shard]) -> int:
    return sum(len(unsettled(shard.settled, shard.lines)) for shard in shards)


async def held(world: World) -> Batch:
    """Create a batch that is held after a part of its trial."""
    batch = await world.running(shards=SHARDS, hold=Hold.TRIAL)
    trial = await world.claim()
    for shard in trial[:3]:
        await fail(world, shard, unsettled(shard.settled, shard.lines))
    for shard in trial[3:]:
        await world.store.release(batch.id, owner=ME, shards=[(shard.n, shard.epoch)])
    seen = await world.seen(batch)
    assert seen.is_held
    return seen


@pytest.mark.rule("G6", "Before the first lines are recorded, only a few lines of the batch can be claimed.")
async def test_only_the_trial_of_a_new_batch_can_be_claimed(world: World) -> None:
    await world.running(shards=SHARDS, hold=Hold.TRIAL)
    assert lines_of(await world.claim()) == 64
    assert await world.claim(holder=OTHER) == []


async def test_every_line_runs_once_the_trial_is_fine(world: World) -> None:
    batch = await world.running(shards=SHARDS, hold=Hold.TRIAL)
    trial = await world.claim()
    await world.record_all(trial[:3])
    seen = await world.seen(batch)
    assert (seen.hold, seen.is_held) == (Hold.WATCHING, False)
    rest = await world.claim(holder=OTHER)
    assert lines_of(rest) == 1000 - 64
    await world.record_all([*trial[3:], *rest])
    finish = await world.finish()
    assert (finish.batch.completed, finish.leftovers) == (1000, [])
    assert await world.publish(finish) is BatchStatus.COMPLETED


@pytest.mark.rule("G6", "No line of a held batch can be claimed.")
async def test_a_held_batch_gives_nothing_to_a_claim(world: World) -> None:
    batch = await held(world)
    found = await world.store.batches(batch.project_id, after=None, limit=9, status=Hold.HELD)
    assert [each.id for each in found or []] == [batch.id]
    assert await world.claim() == []
    assert (await world.store.signals([batch.id]))[0].held
    assert await world.store.lease_finalizable(owner=ME, lease=30, at=NOW) is None


@pytest.mark.rule("G6", "A released batch goes on and is not held again.")
async def test_a_released_batch_goes_on(world: World) -> None:
    batch = await held(world)
    released = await world.store.release_batch(batch.project_id, batch.id)
    assert released is not None
    assert (released[0].hold, released[1]) == (Hold.OFF, True)
    again = await world.store.release_batch(batch.project_id, batch.id)
    assert again is not None
    assert again[1] is False
    assert await world.store.release_batch("another", batch.id) is None
    assert not (await world.store.signals([batch.id]))[0].held
    shards = await world.claim()
    assert lines_of(shards) == 1000 - 24
    for shard in shards:
        await fail(world, shard, unsettled(shard.settled, shard.lines))
    finish = await world.finish()
    assert (finish.batch.failed, finish.leftovers) == (1000, [])


@pytest.mark.rule("G6", "A held batch can be cancelled and expires.")
@pytest.mark.parametrize("end", ["cancelled", "expired"])
async def test_a_held_batch_ends_as_ever(world: World, end: str) -> None:
    batch = await held(world)
    if end == "cancelled":
        await world.store.cancel_batch(batch.project_id, batch.id, at=NOW + 5)
    else:
        assert await world.expire(at=NOW + DAY) == [batch.id]
    released = await world.store.release_batch(batch.project_id, batch.id)
    assert released is not None
    assert released[1] is False
    finish = await world.finish()
    assert lines_of(finish.leftovers) == 1000 - 24
    assert await world.publish(finish) == end


async def test_shards_of_a_dead_worker_stay_withheld(world: World) -> None:
    batch = await world.running(shards=SHARDS, hold=Hold.TRIAL)
    mine, others = await world.claim(lines=16), await world.claim(holder=OTHER)
    for shard in [*mine, others[0]]:
        await fail(world, shard, unsettled(shard.settled, shard.lines))
    assert (await world.seen(batch)).is_held
    await world.die(OTHER)
    await world.pass_time(60)
    assert await world.rescue() == len(others) - 1
    assert await world.claim() == []
    assert await world.store.release_batch(batch.project_id, batch.id) is not None
    assert lines_of(await world.claim(lines=100_000)) > 0


async def test_a_batch_whose_trial_cannot_be_read_runs_its_other_lines(world: World) -> None:
    batch = await world.running(shards=SHARDS, hold=Hold.TRIAL)
    for shard in await world.claim():
        await world.store.close_shard(batch.id, shard.n, epoch=shard.epoch, owner=ME)
    assert (await world.seen(batch)).hold is Hold.WATCHING
    assert lines_of(await world.claim()) == 1000 - 64


@pytest.mark.rule("G6", "A repair of a batch whose trial has not begun opens only the trial.")
async def test_a_repair_before_the_trial_opens_only_the_trial(world: World) -> None:
    """G7: all lines of a batch with reuse wait for earlier answers, and run if these cannot be looked for."""
    batch = await world.running(shards=SHARDS, hold=Hold.TRIAL, reuse=Reuse.LOOKUP)
    lease = await world.finish()
    opened = [
        RepairedShard(n=shard.n, settled=shard.settled, completed=0, failed=0, state=ShardState.OPEN)
        for shard in lease.following
    ]
    await world.store.repair_batch(
        lease, RepairChanges(shards=opened, removed={}, lost=[], added=[], errors=[]), at=NOW
    )
    trial = await world.claim()
    assert lines_of(trial) == 64
    await world.record_all(trial)
    rest = await world.claim()
    assert lines_of(rest) == 1000 - 64
    await world.record_all(rest)
    finish = await world.finish()
    assert (finish.batch.id, finish.batch.completed, finish.leftovers) == (batch.id, 1000, [])


async def test_a_batch_without_a_hold_is_never_held(world: World) -> None:
    batch = await world.running(shards=SHARDS)
    shards = await world.claim()
    assert lines_of(shards) == 1000
    for shard in shards[:5]:
        await fail(world, shard, unsettled(shard.settled, shard.lines))
    assert not (await world.seen(batch)).is_held


async def test_a_check_opens_nothing_of_a_held_batch(world: World) -> None:
    """F6: withheld shards of a held batch are no damage."""
    batch = await held(world)
    inspected = await world.store.inspect_batch(batch.id)
    assert inspected is not None
    assert inspected.unclaimable == []
    await world.store.open_missing_lanes(batch.id)
    assert await world.claim() == []
