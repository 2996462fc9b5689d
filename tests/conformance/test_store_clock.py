"""Clocks in every store: which one ends a lease, which one ends a window; and none runs backwards in a batch."""

import pytest

from batchline.domain.errors import LeaseLost
from batchline.domain.fleet import Report
from batchline.domain.records import Batch
from tests.support.stores import DAY, LEASE, ME, NOW, OTHER, World

pytestmark = pytest.mark.anyio

ERRORS, ANSWER = b'{"object":"list","data":[]}', b'{"error":{}}'
YEAR = 365 * DAY


async def count_interrupted(world: World) -> int:
    return len(await world.store.fail_interrupted(owner=ME, errors=ERRORS, answer=ANSWER, at=NOW))


async def finalizing(world: World) -> Batch:
    """Return a batch that this process has leased to finalize it."""
    batch = await world.running()
    await world.record_all(await world.claim())
    await world.finish()
    return await world.seen(batch)


@pytest.mark.rule("D5", "No time of day ends a lease.")
async def test_the_time_of_day_ends_no_lease(world: World) -> None:
    """D5: uploads, validations, finalizations, shards and the fleet, a year ahead and a year back."""
    file = world.file(await world.owner(), expires_at=NOW + 9 * YEAR)
    await world.store.begin_upload(file, owner=ME, lease=LEASE)
    validating, ending = await world.validating(), await finalizing(world)
    await world.running()
    (shard,) = await world.claim()
    await world.store.heartbeat(Report(owner=ME, runs_batches=True), caps={}, lease=LEASE)
    for time in (NOW + YEAR, NOW - YEAR):
        assert await world.expire_files(owner=ME, at=time, limit=9) == []
        assert await world.rescue() == 0
        assert await count_interrupted(world) == 0
        assert await world.store.lease_finalizable(owner=ME, lease=LEASE, at=NOW) is None
        assert [report.owner for report in await world.store.reports()] == [ME]
    await world.store.renew_upload(file.id, owner=ME, lease=LEASE)
    await world.store.renew_batch(validating.id, epoch=1, owner=ME, lease=LEASE)
    await world.store.renew_batch(ending.id, epoch=ending.epoch, owner=ME, lease=LEASE)
    assert await world.store.renew_shards(owner=ME, lease=LEASE) == {(shard.batch_id, shard.n, shard.epoch)}


@pytest.mark.rule("D5", "After an outage of the database every upload has a whole lease of time to renew.")
async def test_an_outage_of_the_database_ends_no_upload(world: World) -> None:
    file = world.file(await world.owner())
    await world.rescue()
    await world.store.begin_upload(file, owner=ME, lease=LEASE)
    await world.lose_time(5 * LEASE)
    assert await world.expire_files(owner=ME, at=NOW, limit=9) == [], "before anyone has looked for ended leases"
    await world.rescue()
    await world.pass_time(0.9 * LEASE)
    assert await world.expire_files(owner=ME, at=NOW, limit=9) == []
    await world.store.renew_upload(file.id, owner=ME, lease=LEASE)
    await world.store.finish_upload(file, owner=ME)


@pytest.mark.rule("D5", "After an outage of the database every validation has a whole lease of time to renew.")
async def test_an_outage_of_the_database_ends_no_validation(world: World) -> None:
    await world.rescue()
    batch = await world.validating()
    await world.lose_time(5 * LEASE)
    assert await count_interrupted(world) == 0
    await world.rescue()
    await world.pass_time(0.9 * LEASE)
    assert await count_interrupted(world) == 0
    await world.store.renew_batch(batch.id, epoch=1, owner=ME, lease=LEASE)


@pytest.mark.rule("D5", "After an outage of the database every finalization has a whole lease of time to renew.")
async def test_an_outage_of_the_database_ends_no_finalization(world: World) -> None:
    await world.rescue()
    batch = await finalizing(world)
    await world.lose_time(5 * LEASE)
    assert await world.store.lease_finalizable(owner=ME, lease=LEASE, at=NOW) is None
    await world.rescue()
    await world.pass_time(0.9 * LEASE)
    assert await world.store.lease_finalizable(owner=ME, lease=LEASE, at=NOW) is None
    await world.store.renew_batch(batch.id, epoch=batch.epoch, owner=ME, lease=LEASE)


async def test_an_outage_of_the_database_does_not_prolong_the_wait_after_a_failure(world: World) -> None:
    """C12: nobody renews the lease on a batch that could not be finalized. It is a wait, which has ended meanwhile."""
    await world.rescue()
    await world.running()
    await world.record_all(await world.claim())
    await world.store.defer_finalize(await world.finish(), seconds=1)
    await world.lose_time(5 * LEASE)
    await world.rescue()
    again = await world.store.lease_finalizable(owner=ME, lease=LEASE, at=NOW)
    assert again is not None
    assert again.failures == 1


async def test_who_does_not_renew_after_an_outage_is_dead(world: World) -> None:
    """D5: the time to renew ends, too."""
    file = world.file(await world.owner())
    await world.rescue()
    await world.store.begin_upload(file, owner=ME, lease=LEASE)
    validating, ending = await world.validating(), await finalizing(world)
    await world.lose_time(5 * LEASE)
    await world.rescue()
    await world.pass_time(1.1 * LEASE)
    await world.rescue()
    assert await world.expire_files(owner=ME, at=NOW, limit=9) == [file.object_key]
    assert await count_interrupted(world) == 1
    taken = await world.store.lease_finalizable(owner=ME, lease=LEASE, at=NOW)
    assert taken is not None
    assert taken.batch.id == ending.id
    with pytest.raises(LeaseLost):
        await world.store.renew_batch(validating.id, epoch=1, owner=ME, lease=LEASE)


@pytest.mark.rule("C11", "The times of a batch never run backwards, whatever the clock does.")
async def test_times_of_a_batch_never_run_backwards(world: World) -> None:
    """C11: each step is taken by a process whose clock is an hour behind the last one's."""
    batch = await world.running(created_at=NOW + 3 * 3600, expires_at=NOW + DAY)
    assert batch.in_progress_at == batch.created_at
    await world.record_all(await world.claim())
    finish = await world.finish(at=NOW + 2 * 3600)
    assert finish.batch.finalizing_at == batch.created_at
    await world.publish(finish, at=NOW + 3600)
    assert (await world.seen(batch)).completed_at == batch.created_at


async def test_times_of_a_batch_that_is_cancelled_or_expires_never_run_backwards(world: World) -> None:
    early, validating = await world.running(shards=[1], expires_at=NOW + 5), await world.validating(created_at=NOW + 9)
    assert await world.store.cancel_batch(validating.project_id, validating.id, at=NOW) is not None
    cancelled = await world.seen(validating)
    assert (cancelled.cancelling_at, cancelled.cancelled_at) == (NOW + 9, NOW + 9)
    assert await world.expire(at=NOW + 5) == [early.id]
    await world.publish(await world.finish(), at=NOW - DAY)
    assert (await world.seen(early)).expired_at == NOW
    running = await world.running(created_at=NOW + 50)
    assert await world.store.cancel_batch(running.project_id, running.id, at=NOW) is not None
    assert (await world.seen(running)).cancelling_at == NOW + 50
    await world.publish(await world.finish(holder=OTHER), at=NOW)
    assert (await world.seen(running)).cancelled_at == NOW + 50
