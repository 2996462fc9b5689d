"""Leases on shards in every store, and what is recorded under them: rules C10 to C12, D5."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from batchline.domain.bitmap import unsettled
from batchline.domain.errors import LeaseLost
from batchline.domain.records import Batch, Lane, LeasedBatch, Segment, Shard
from batchline.ports import BatchSignal
from tests.support.stores import BYTES_A_LINE, CHAT, DAY, LEASE, ME, NOW, OTHER, World, cut, key, moved_on, segment

pytestmark = pytest.mark.anyio

Lose = Callable[[World, Shard], Awaitable[Shard]]


async def struck(world: World, *, times: int = 2, expires_at: int = NOW + DAY) -> Batch:
    """Create a batch with one shard that got so many strikes."""
    batch = await world.running(shards=[1], expires_at=expires_at)
    for _ in range(times):
        assert [shard.batch_id for shard in await world.claim(holder=OTHER)] == [batch.id]
        await world.die(OTHER)
        assert await world.rescue() == 1
    return batch


async def recorded(world: World, batch: Batch) -> bytes:
    """Return the data of all segments of a batch."""
    return b"".join(one.data or b"" for one in await world.store.segments(batch.id, after=0, limit=100))


async def counts(world: World, batch: Batch) -> tuple[int, int]:
    seen = await world.seen(batch)
    return seen.completed, seen.failed


async def test_a_claim_says_all_that_running_needs(world: World) -> None:
    owner = await world.owner()
    batch = await world.running(owner, shards=[3, 10])
    claim = await world.store.claim(owner=ME, lease=LEASE, lines=99, bytes=1 << 30, alone=True, at=NOW)
    assert claim.batches == [
        LeasedBatch(
            id=batch.id,
            project_id=owner.project_id,
            organization_id=owner.organization_id,
            endpoint=CHAT,
            expires_at=NOW + DAY,
            work_key=f"work/{batch.id}/1",
            key_revoked=False,
            funds=0,
        )
    ]
    first = Shard(batch_id=batch.id, n=0, offset=0, length=300, lines=3, model="m", settled=b"\0", epoch=1, strikes=0)
    assert claim.shards == [first, replace(first, n=1, offset=300, length=1000, lines=10, settled=b"\0\0")]


@pytest.mark.rule("D8", "Within a project the earliest deadline is first.")
async def test_the_earliest_deadline_is_claimed_first(world: World) -> None:
    """C11: the order of creation does not matter."""
    late = await world.running(shards=[1, 1], expires_at=NOW + 300)
    soon = await world.running(shards=[1], expires_at=NOW + 100)
    assert [shard.batch_id for shard in await world.claim()] == [soon.id, late.id, late.id]


@pytest.mark.rule("C11", "From expires_at no attempt starts.")
async def test_a_batch_past_its_window_is_not_claimed(world: World) -> None:
    """C11: from ``expires_at`` on no attempt starts, even before the batch is stopped."""
    await world.running(expires_at=NOW + 100)
    assert await world.claim(at=NOW + 100) == []
    assert len(await world.claim(at=NOW + 99)) == 1


async def test_a_clock_that_is_ahead_costs_nobody_a_shard(world: World) -> None:
    """C11: a shard that is late by one worker's clock can be claimed by workers with the right time.

    This holds even after the first worker took a later shard of the same lane.
    """
    owner = await world.owner()
    soon = await world.running(owner, shards=[1, 1], expires_at=NOW + 100)
    late = await world.running(owner, shards=[1, 1], expires_at=NOW + 200)
    assert [shard.batch_id for shard in await world.claim(at=NOW + 150, lines=1)] == [late.id]
    assert [shard.batch_id for shard in await world.claim()] == [soon.id, soon.id, late.id]


@pytest.mark.parametrize(("wanted", "taken"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (100, 3)])
async def test_a_claim_stops_at_enough_lines_or_bytes(world: World, wanted: int, taken: int) -> None:
    await world.running(shards=[4, 4, 4])
    assert len(await world.claim(lines=wanted)) == taken
    await _release_all(world)
    assert len(await world.claim(bytes=wanted * BYTES_A_LINE)) == taken


async def _release_all(world: World) -> None:
    for batch_id, n, epoch in await world.store.renew_shards(owner=ME, lease=LEASE):
        await world.store.release(batch_id, owner=ME, shards=[(n, epoch)])


async def test_only_lines_that_are_left_count_towards_a_claim(world: World) -> None:
    await world.running(shards=[4, 4])
    (shard,) = await world.claim(lines=1)
    await world.record(shard, [0, 1, 2])
    await _release_all(world)
    assert len(await world.claim(lines=2)) == 2


async def test_no_shard_is_leased_twice(world: World) -> None:
    """D5: this holds for claims at the same moment too."""
    await world.running(shards=[1] * 12)
    claims = await asyncio.gather(*(world.claim(holder=f"worker {n}", lines=3) for n in range(5)))
    taken = [shard.n for shards in claims for shard in shards]
    assert sorted(taken) == list(range(12))


async def test_the_epoch_rises_with_every_lease(world: World) -> None:
    """The fence: no two holders of a shard ever have the same epoch."""
    await world.running()
    epochs = []
    for _ in range(3):
        (shard,) = await world.claim()
        epochs.append(shard.epoch)
        await _release_all(world)
    assert epochs == sorted(set(epochs))


@pytest.mark.rule("D5", "One death sets nothing apart.")
@pytest.mark.parametrize("alone", [True, False])
async def test_one_death_sets_nothing_apart(world: World, alone: bool) -> None:
    """D5: one death may have any cause; a shard with one strike runs beside others, even on a busy worker."""
    once = await struck(world, times=1, expires_at=NOW + 10)
    fresh = await world.running(shards=[1, 1])
    claimed = await world.claim(alone=alone)
    assert [(shard.batch_id, shard.strikes) for shard in claimed] == [(once.id, 1), (fresh.id, 0), (fresh.id, 0)]


@pytest.mark.rule("D5", "A shard struck twice runs alone.")
async def test_a_shard_struck_twice_is_run_alone(world: World) -> None:
    """D5: it runs with nothing beside it, so that its shard is the cause of the next death."""
    await struck(world, expires_at=NOW + 10)
    await world.running(shards=[1, 1])
    (alone,) = await world.claim(alone=True)
    assert alone.strikes == 2


async def test_a_shard_struck_twice_never_joins_others(world: World) -> None:
    """D5: new shards with earlier deadlines are claimed without it."""
    await struck(world)
    fresh = await world.running(shards=[1, 1], expires_at=NOW + 10)
    assert {shard.batch_id for shard in await world.claim(alone=True)} == {fresh.id}


async def test_a_shard_struck_twice_does_not_starve(world: World) -> None:
    """D5: once it comes first, a busy worker gets nothing until it can take the shard alone."""
    await struck(world, expires_at=NOW + 10)
    await world.running(shards=[1] * 9)
    assert await world.claim(alone=False) == []
    assert [shard.strikes for shard in await world.claim(alone=True)] == [2]
    assert len(await world.claim(alone=False)) == 9


@pytest.mark.rule("C8", "Counts are live while a batch runs.")
async def test_lines_count_together_with_their_segment(world: World) -> None:
    """C8, C12: the counts of an active batch are those of its recorded lines."""
    batch = await world.running(shards=[4, 2])
    first, second = await world.claim()
    first = await world.record(first, [1, 3], failed=1)
    assert await counts(world, batch) == (1, 1)
    await world.record_all([first, second])
    assert await counts(world, batch) == (5, 1)
    assert await recorded(world, batch) == b"+-" + b"++" + b"++"


async def test_a_segment_comes_back_as_it_was_recorded(world: World) -> None:
    """Pages of segments are in the order in which they were recorded."""
    batch = await world.running(shards=[4])
    (shard,) = await world.claim()
    written = [
        Segment(output_bytes=3, error_bytes=2, data=b"\0\xff\n--"),
        Segment(output_bytes=1 << 40, error_bytes=0, object_key="segments/one"),
        Segment(output_bytes=0, error_bytes=1, data=b"-"),
    ]
    for position, one in enumerate(written):
        shard, progress = moved_on(shard, [position])
        await world.store.record(batch.id, owner=ME, progress=[progress], segment=one, at=NOW)
    read = await world.store.segments(batch.id, after=0, limit=2)
    read += await world.store.segments(batch.id, after=read[-1].id, limit=2)
    assert [replace(one, id=0) for one in read] == written
    assert await world.store.segments(batch.id, after=read[-1].id, limit=2) == []


async def _released(world: World, shard: Shard) -> Shard:
    await world.store.release(shard.batch_id, owner=world.holder(shard), shards=[(shard.n, shard.epoch)])
    return shard


async def _done(world: World, shard: Shard) -> Shard:
    await world.record_all([shard])
    return shard


async def _of_another_epoch(world: World, shard: Shard) -> Shard:
    return replace(shard, epoch=shard.epoch + 1)


async def _leased_anew(world: World, shard: Shard) -> Shard:
    await _released(world, shard)
    assert await world.claim(holder=OTHER)
    return shard


async def _rescued(world: World, shard: Shard) -> Shard:
    await world.die(OTHER)
    assert await world.rescue()
    return shard


@pytest.mark.rule("C12", "Every line is in exactly one file once: what is no longer held cannot be recorded.")
@pytest.mark.parametrize("lose", [_released, _done, _of_another_epoch, _leased_anew, _rescued])
async def test_what_is_no_longer_held_cannot_be_recorded(world: World, lose: Lose) -> None:
    """C12, D5: after a lost lease neither segment nor counts are stored, even beside a shard that is still held."""
    batch = await world.running(shards=[2, 2])
    (shard,), (held,) = await world.claim(holder=OTHER, lines=1), await world.claim(holder=OTHER)
    shard = await lose(world, shard)
    before = await counts(world, batch), await recorded(world, batch)
    zombie, living = moved_on(shard, [0])[1], moved_on(held, [0])[1]
    for progress in ([zombie], [zombie, living], [living, zombie]):
        with pytest.raises(LeaseLost):
            await world.store.record(batch.id, owner=OTHER, progress=progress, segment=segment(len(progress)), at=NOW)
    assert (await counts(world, batch), await recorded(world, batch)) == before
    if lose is not _rescued:
        await world.record(held, [0])


async def test_renewal_lists_exactly_what_is_held(world: World) -> None:
    """Shards that are done, released or held by another worker are not listed."""
    await world.running(shards=[1] * 4)
    held, done, released = await world.claim(lines=3)
    (other_shard,) = await world.claim(holder=OTHER)
    await world.record_all([done])
    await _released(world, released)
    assert await world.store.renew_shards(owner=ME, lease=LEASE) == {key(held)}
    assert await world.store.renew_shards(owner=OTHER, lease=LEASE) == {key(other_shard)}
    assert await world.store.renew_shards(owner="nobody", lease=LEASE) == set()


@pytest.mark.rule("D5", "What a worker recorded is not run again.")
async def test_what_is_handed_back_is_open_again_without_a_strike(world: World) -> None:
    """F5: the shard is open again, and its recorded lines stay recorded."""
    await world.running(shards=[4])
    (shard,) = await world.claim()
    await world.record(shard, [0, 2])
    await _released(world, replace(shard, epoch=shard.epoch - 1))
    assert await world.claim() == [], "a stale epoch hands nothing back"
    await _released(world, shard)
    (again,) = await world.claim()
    assert (again.strikes, unsettled(again.settled, again.lines)) == (0, [1, 3])


async def test_what_is_handed_back_to_a_stopped_batch_never_runs(world: World) -> None:
    """C10, C11: a shard released to a stopped batch is left over for the error file."""
    batch = await world.running(shards=[4])
    (shard,) = await world.claim()
    await world.store.cancel_batch(batch.project_id, batch.id, at=NOW)
    await world.record(shard, [2])
    await _released(world, shard)
    assert await world.claim() == []
    (left,) = (await world.finish()).leftovers
    assert unsettled(left.settled, left.lines) == [0, 1, 3]


@pytest.mark.rule("C10", "After a cancel what is in flight counts, and what never ran does not start.")
async def test_after_a_cancel_nothing_starts_and_what_is_in_flight_counts(world: World) -> None:
    """C10: a cancelled batch is not claimed from."""
    batch = await world.running(shards=[2, 2])
    (shard,) = await world.claim(lines=1)
    await world.store.cancel_batch(batch.project_id, batch.id, at=NOW)
    assert await world.claim() == []
    assert await world.store.lease_finalizable(owner=ME, lease=LEASE, at=NOW) is None
    await world.record_all([shard])
    assert await counts(world, batch) == (2, 0)
    assert [left.n for left in (await world.finish()).leftovers] == [1]


async def test_workers_hear_of_stops_and_revoked_keys(world: World) -> None:
    """C11, D2, F3: a rotated key does not count as revoked."""
    owners = [await world.owner() for _ in range(4)]
    calm, cancelled, expired, revoked = [await world.running(owner) for owner in owners[:2]] + [
        await world.running(owners[2], expires_at=NOW + 10),
        await world.running(owners[3]),
    ]
    await world.store.rotate_key(owners[0].key_id, digest=b"new", hint="bl-new")
    await world.store.cancel_batch(cancelled.project_id, cancelled.id, at=NOW)
    await world.expire(at=NOW + 10)
    await world.store.revoke_key(owners[3].key_id, at=NOW)
    asked = [calm.id, cancelled.id, expired.id, revoked.id]
    signals = await world.store.signals(asked)
    assert [(signal.batch_id, signal.stop, signal.key_revoked) for signal in signals] == [
        (calm.id, None, False),
        (cancelled.id, "cancelled", False),
        (expired.id, "expired", False),
        (revoked.id, None, True),
    ]
    assert all(isinstance(signal, BatchSignal) for signal in signals)
    assert await world.store.signals([]) == []


async def test_a_claim_tells_of_a_revoked_key(world: World) -> None:
    """D2: a claim says whether the batch's key was revoked."""
    owner = await world.owner()
    await world.running(owner)
    await world.store.revoke_key(owner.key_id, at=NOW)
    claim = await world.store.claim(owner=ME, lease=LEASE, lines=9, bytes=1 << 30, alone=True, at=NOW)
    assert [batch.key_revoked for batch in claim.batches] == [True]


@pytest.mark.rule("D3", "Lines of an upstream that wants no more are not claimed.")
async def test_lanes_that_are_left_out_are_not_claimed(world: World) -> None:
    """D6, A8: a full upstream does not keep the lines of other models from being claimed.

    Nor does it keep those of projects that may not use its model, whose lines are refused at once.
    """
    alpha, beta = await world.owner("alpha"), await world.owner("beta")
    await world.running(alpha, model="away", expires_at=NOW + 10)
    away = await world.running(beta, model="away", expires_at=NOW + 20)
    here = await world.running(alpha, model="here", expires_at=NOW + 30)
    everybody = [Lane(model="away", project_id=None), Lane(model="elsewhere", project_id=None)]
    assert [shard.batch_id for shard in await world.claim(without=everybody)] == [here.id]
    assert await world.claim(without=everybody) == []
    of_alpha = [Lane(model="away", project_id=alpha.project_id)]
    assert [shard.batch_id for shard in await world.claim(without=of_alpha)] == [away.id]
    assert len(await world.claim()) == 1


@pytest.mark.parametrize("model", ["a\0b", "\0", "\x10", "\x100", 'é"\\u0000\\', "\u2028"])
async def test_a_lane_with_any_name_can_be_left_out(world: World, model: str) -> None:
    """D3: clients name models with any characters, and no name keeps lines of other projects from being claimed."""
    alpha, beta = await world.owner("alpha"), await world.owner("beta")
    left_out = await world.running(alpha, model=model)
    others = {(await world.running(beta, model=name)).id for name in (model, "m")}
    without = [Lane(model=model, project_id=alpha.project_id)]
    assert {shard.batch_id for shard in await world.claim(without=without)} == others
    assert [shard.batch_id for shard in await world.claim()] == [left_out.id]


def _share_of(shards: list[Shard], batch: Batch) -> int:
    return sum(shard.lines for shard in shards if shard.batch_id == batch.id)


async def test_projects_share_a_claim_whoever_came_first(world: World) -> None:
    """D8: a small batch does not wait for a large one that was created before, whatever their deadlines are."""
    large = await world.running(await world.owner("large"), shards=[10] * 50, expires_at=NOW + 10)
    small = await world.running(await world.owner("small"), shards=[5], expires_at=NOW + DAY)
    claimed = await world.claim(lines=20)
    assert (_share_of(claimed, large), _share_of(claimed, small)) == (20, 5)


@pytest.mark.rule("D8", "Over time, lanes get the same number of lines.")
async def test_over_time_lanes_get_the_same_number_of_lines(world: World) -> None:
    """D8: the size of the shards does not matter."""
    coarse = await world.running(await world.owner("coarse"), shards=[20] * 20)
    fine = await world.running(await world.owner("fine"), shards=[2] * 200)
    got = [shard for _ in range(20) for shard in await world.claim(lines=10)]
    assert abs(_share_of(got, coarse) - _share_of(got, fine)) <= 20


@pytest.mark.rule("D8", "A lane that slept gets its share, and nothing for the past.")
async def test_a_lane_that_slept_gets_its_share_and_nothing_for_the_past(world: World) -> None:
    """D8: otherwise a new lane would delay all lanes that were served before it was opened."""
    busy = await world.running(await world.owner("busy"), shards=[10] * 30)
    for _ in range(10):
        assert await world.claim(lines=10)
    late = await world.running(await world.owner("late"), shards=[10] * 30)
    got = [shard for _ in range(10) for shard in await world.claim(lines=10)]
    assert abs(_share_of(got, busy) - _share_of(got, late)) <= 20


async def test_models_of_a_project_are_lanes_of_their_own(world: World) -> None:
    owner = await world.owner()
    one = await world.running(owner, shards=[10] * 5, model="one")
    two = await world.running(owner, shards=[10] * 5, model="two")
    claimed = await world.claim(lines=20)
    assert (_share_of(claimed, one), _share_of(claimed, two)) == (10, 10)
    rest = await world.claim(without=[Lane(model=None, project_id=owner.project_id)])
    assert rest == []


async def test_shards_of_very_many_names_start_claim_and_end(world: World) -> None:
    """A database may hold batches that were cut when each model had its own lane. PostgreSQL has room for a limited
    number of locks, so the lanes of a project are one lock."""
    owner = await world.owner()
    batch = await world.validating(owner)
    shards = [replace(shard, model=f"model {n}") for n, shard in enumerate(cut([1] * 20_000))]
    await world.store.start_batch(batch.id, epoch=1, shards=shards, total=len(shards), work_key="w", at=NOW)
    other = await world.running(await world.owner("beta"), shards=[1] * 9)
    claimed = await world.claim(lines=32)
    assert claimed
    await world.store.release(
        batch.id, owner=ME, shards=[(shard.n, shard.epoch) for shard in claimed if shard.batch_id == batch.id]
    )
    await world.store.cancel_batch(owner.project_id, batch.id, at=NOW)
    assert await world.publish(await world.finish()) == "cancelled"
    await world.store.delete_work(batch.id)
    assert {shard.batch_id for shard in await world.claim()} <= {other.id}
