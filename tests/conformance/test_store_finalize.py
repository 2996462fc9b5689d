"""The end of batches in every store: rules C10 to C13."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import pytest

from batchline.domain.bitmap import unsettled
from batchline.domain.errors import LeaseLost
from batchline.domain.records import Batch, Shard
from batchline.domain.states import TERMINAL, BatchStatus
from batchline.ports import KnownBatch
from tests.support.stores import DAY, LEASE, ME, NOW, OTHER, World, cut, moved_on, segment

pytestmark = pytest.mark.anyio

ERRORS = b'{"object":"list","data":[]}'


async def _completed(world: World) -> Batch:
    batch = await world.running(shards=[2, 2], idempotency_key="one")
    await world.record_all(await world.claim())
    return batch


async def _cancelled(world: World) -> Batch:
    batch = await world.running(shards=[2, 2], idempotency_key="one")
    (shard,) = await world.claim(lines=1)
    await world.store.cancel_batch(batch.project_id, batch.id, at=NOW + 20)
    await world.record_all([shard])
    return batch


async def _expired(world: World) -> Batch:
    batch = await world.running(shards=[2, 2], idempotency_key="one")
    (shard,) = await world.claim(lines=1)
    assert await world.expire(at=NOW + DAY) == [batch.id]
    await world.record_all([shard])
    return batch


ENDINGS = [(_completed, "completed"), (_cancelled, "cancelled"), (_expired, "expired")]
Reach = Callable[[World], Awaitable[Batch]]


@pytest.mark.rule("C13", "On expiry what never ran is batch_expired, and what finished is kept.")
async def test_a_batch_past_its_window_is_stopped_once(world: World) -> None:
    """C11, C13: open shards are closed; the lines of leased ones may still be recorded."""
    batch = await world.running(shards=[2, 2], expires_at=NOW + 10)
    later = await world.running(shards=[2])
    (shard,) = await world.claim(lines=1)
    assert await world.expire(at=NOW + 9) == []
    assert await world.expire(at=NOW + 10) == [batch.id]
    assert await world.expire(at=NOW + 11) == []
    seen = await world.seen(batch)
    assert (seen.status, seen.stop, seen.expired_at) == (BatchStatus.IN_PROGRESS, "expired", None)
    assert [one.batch_id for one in await world.claim()] == [later.id]
    await world.record(shard, [0])
    await world.store.release(batch.id, owner=ME, shards=[(shard.n, shard.epoch)])
    finish = await world.finish()
    assert [unsettled(left.settled, left.lines) for left in finish.leftovers] == [[1], [0, 1]]
    assert finish.batch.completed == 1


@pytest.mark.rule("C11", "A batch with nothing left to run does not expire.")
async def test_only_what_has_work_left_expires(world: World) -> None:
    """C11: batches that are drained, finalizing, cancelling or validating do not expire."""
    validating = await world.validating()
    finalizing = await world.running()
    await world.record_all(await world.claim())
    await world.finish()
    recorded = await world.running()
    await world.record_all(await world.claim())
    cancelling = await world.running()
    await world.claim()
    await world.store.cancel_batch(cancelling.project_id, cancelling.id, at=NOW)
    before = [await world.seen(batch) for batch in (validating, finalizing, recorded, cancelling)]
    assert await world.expire(at=NOW + 2 * DAY) == []
    assert [await world.seen(batch) for batch in before] == before
    finish = await world.finish()
    assert finish.batch.id == recorded.id
    assert await world.publish(finish) is BatchStatus.COMPLETED


async def test_a_batch_is_finished_when_no_shard_is_open_or_leased(world: World) -> None:
    batch = await world.running(shards=[2, 2])

    async def nothing_to_finish() -> bool:
        return await world.store.lease_finalizable(owner=ME, lease=LEASE, at=NOW) is None

    assert await nothing_to_finish()
    first, second = await world.claim()
    await world.record_all([first])
    assert await nothing_to_finish()
    await world.record_all([second])
    finish = await world.finish()
    assert (finish.batch.id, finish.work_key, finish.leftovers) == (batch.id, f"work/{batch.id}/1", [])
    assert (finish.batch.completed, finish.batch.failed, finish.epoch) == (4, 0, finish.batch.epoch)


@pytest.mark.rule("C11", "Each time is set when its state is entered and never changes.")
async def test_a_finish_is_leased_to_one(world: World) -> None:
    """C12: a second finalizer gets the batch only after the first died or lost its lease, under a higher epoch."""
    await _completed(world)
    first = await world.finish()
    assert await world.store.lease_finalizable(owner=ME, lease=LEASE, at=NOW) is None
    await world.pass_time(LEASE - 1)
    await world.store.renew_batch(first.batch.id, epoch=first.epoch, owner=ME, lease=LEASE)
    await world.pass_time(LEASE - 1)
    assert await world.store.lease_finalizable(owner=ME, lease=LEASE, at=NOW) is None
    await world.pass_time(2)
    second = await world.finish(at=NOW + 150)
    await world.die(ME)
    third = await world.finish(holder=OTHER, at=NOW + 160)
    assert first.epoch < second.epoch < third.epoch
    assert third.batch.finalizing_at == first.batch.finalizing_at == NOW + 100
    for old in (first, second):
        with pytest.raises(LeaseLost):
            await world.store.renew_batch(old.batch.id, epoch=old.epoch, owner=ME, lease=LEASE)


@pytest.mark.rule("C11", "Only an unstopped batch passes through finalizing.")
@pytest.mark.rule("C12", "In every terminal state completed + failed = total.")
@pytest.mark.parametrize(("reach", "end"), ENDINGS)
async def test_a_batch_ends_in_the_state_it_was_heading_for(world: World, reach: Reach, end: str) -> None:
    """C11, C12: each state sets its time; only a batch that was not stopped passes through ``finalizing``."""
    batch = await reach(world)
    finish = await world.finish()
    status = "finalizing" if end == "completed" else {"cancelled": "cancelling", "expired": "in_progress"}[end]
    assert finish.batch.status == status
    assert len(finish.leftovers) == (0 if end == "completed" else 1)
    assert await world.publish(finish) == end
    seen = await world.seen(batch)
    assert seen.status == end
    assert seen.completed + seen.failed == seen.total == 4
    assert seen.completed == (4 if end == "completed" else 2)
    times = {
        "finalizing": seen.finalizing_at,
        "completed": seen.completed_at,
        "cancelling": seen.cancelling_at,
        "cancelled": seen.cancelled_at,
        "expired": seen.expired_at,
        "failed": seen.failed_at,
    }
    entered = {"completed": {"finalizing": NOW + 100}, "cancelled": {"cancelling": NOW + 20}, "expired": {}}[end]
    assert {name: at for name, at in times.items() if at is not None} == {**entered, end: NOW + 200}


@pytest.mark.rule("C11", "Cancelled while finalizing ends cancelled with all results.")
async def test_cancelled_while_finalizing_ends_cancelled_with_all_results(world: World) -> None:
    """C11: this holds even if a finalizer had its lease before the cancel, or another one takes over."""
    for take_over in (False, True):
        batch = await _completed(world) if not take_over else await world.running(shards=[4])
        await world.record_all(await world.claim())
        finish = await world.finish()
        await world.store.cancel_batch(batch.project_id, batch.id, at=NOW + 150)
        if take_over:
            await world.die(ME)
            finish = await world.finish(holder=OTHER, at=NOW + 160)
        assert await world.publish(finish) is BatchStatus.CANCELLED
        seen = await world.seen(batch)
        assert (seen.completed, seen.failed, seen.finalizing_at) == (4, 0, NOW + 100)
        assert (seen.cancelling_at, seen.cancelled_at, seen.completed_at) == (NOW + 150, NOW + 200, None)


async def test_files_counts_and_state_are_published_at_once(world: World) -> None:
    """C12: before the publication neither file is visible; afterwards both are, in the order of a list."""
    owner = await world.owner()
    batch = await world.running(owner, shards=[3])
    (shard,) = await world.claim()
    await world.record(shard, [0, 1, 2], failed=1)
    finish = await world.finish()
    output, errors = world.file(owner, purpose="batch_output"), world.file(owner, purpose="batch_output", is_error=True)
    assert await world.store.file(owner.project_id, output.id, at=NOW) is None
    assert not await world.store.referenced_keys([output.object_key])
    await world.publish(finish, files=[output, errors])
    seen = await world.seen(batch)
    assert (seen.output_file_id, seen.error_file_id) == (output.id, errors.id)
    assert (seen.completed, seen.failed) == (2, 1)
    listed = await world.store.files(
        owner.project_id, purpose="batch_output", ascending=True, after=None, limit=9, at=NOW
    )
    assert listed == [output, errors]
    assert await world.store.referenced_keys([output.object_key])


@pytest.mark.rule("C12", "A file id is set only where there is a file.")
@pytest.mark.parametrize("is_error", [True, False])
async def test_a_file_that_nothing_was_written_to_is_not_named(world: World, is_error: bool) -> None:
    """C12: the id of a file is set only if there is a file."""
    owner = await world.owner()
    batch = await world.running(owner)
    await world.record_all(await world.claim())
    file = world.file(owner, is_error=is_error)
    await world.publish(await world.finish(), files=[file])
    seen = await world.seen(batch)
    assert (seen.output_file_id, seen.error_file_id) == ((None, file.id) if is_error else (file.id, None))


@pytest.mark.rule("C12", "Only the holder of the epoch publishes.")
async def test_only_the_holder_of_the_epoch_publishes(world: World) -> None:
    """C12: neither a finalizer that lost its lease nor a second publication changes anything."""
    owner = await world.owner()
    batch = await world.running(owner)
    await world.record_all(await world.claim())
    old = await world.finish()
    await world.pass_time(LEASE + 1)
    new = await world.finish()
    assert old.owner == new.owner
    late, good = world.file(owner), world.file(owner)
    with pytest.raises(LeaseLost):
        await world.publish(old, files=[late])
    assert await world.seen(batch) == new.batch
    await world.publish(new, files=[good])
    seen = await world.seen(batch)
    for finish in (old, new):
        with pytest.raises(LeaseLost):
            await world.publish(finish, files=[late], at=NOW + 300)
    assert await world.seen(batch) == seen
    assert await world.store.file(owner.project_id, late.id, at=NOW) is None


@pytest.mark.parametrize(("reach", "end"), ENDINGS)
async def test_counts_are_frozen_before_the_work_is_forgotten(world: World, reach: Reach, end: str) -> None:
    """C8, C12: the final counts do not depend on shards or segments."""
    batch = await reach(world)
    assert await _prunable(world) == []
    await world.publish(await world.finish())
    seen = await world.seen(batch)
    assert await _prunable(world) == [batch.id]
    await world.store.delete_work(batch.id)
    assert await world.seen(batch) == seen
    assert (await world.store.batches(batch.project_id, after=None, limit=1)) == [seen]
    assert await world.store.segments(batch.id, after=0, limit=9) == []
    assert await _prunable(world) == []


async def test_finished_batches_come_in_portions(world: World) -> None:
    batches = [await world.running() for _ in range(3)]
    await world.record_all(await world.claim())
    for _ in batches:
        await world.publish(await world.finish())
    await world.validating()
    portion = await _prunable(world, limit=2)
    assert len(portion) == 2
    rest = {batch.id for batch in batches} - set(portion)
    assert set(await _prunable(world, limit=2, without=portion)) == rest
    for batch_id in portion:
        await world.store.delete_work(batch_id)
    assert set(await _prunable(world, limit=2)) == rest


async def test_the_work_of_a_batch_is_kept_for_a_time_after_its_end(world: World) -> None:
    """An older copy of the database, in which the batch still ran, finds its work then."""
    for at in (NOW + 5000, NOW + 100):
        await world.running()
        await world.record_all(await world.claim())
        await world.publish(await world.finish(), at=at)
    found = [await _prunable(world, retention=seconds, at=NOW + 5100) for seconds in (10_000, 3600, 50)]
    assert [len(batch_ids) for batch_ids in found] == [0, 1, 2]
    assert await _prunable(world, retention=50, limit=1, at=NOW + 5100) == found[1]


@pytest.mark.parametrize(("reach", "end"), ENDINGS)
async def test_a_batch_runs_until_it_is_published(world: World, reach: Reach, end: str) -> None:
    """The sweep asks this before it deletes the objects of a batch."""
    batch = await reach(world)
    finish = await world.finish()

    async def known() -> dict[str, KnownBatch]:
        return await world.store.known_batches([batch.id, "batch_unknown"])

    assert await known() == {batch.id: KnownBatch(active=True, has_work=True)}
    await world.publish(finish)
    assert await known() == {batch.id: KnownBatch(active=False, has_work=True)}
    await world.store.delete_work(batch.id)
    assert await known() == {batch.id: KnownBatch(active=False, has_work=False)}


async def _prunable(
    world: World, *, at: int = NOW + 2 * DAY, retention: int = DAY, without: Sequence[str] = (), limit: int = 9
) -> list[str]:
    await world.set_time(at)
    return await world.store.prunable(retention=retention, without=without, limit=limit)


async def _failed(world: World) -> Batch:
    batch = await world.validating(idempotency_key="one")
    await world.store.fail_batch(batch.id, epoch=1, errors=ERRORS, answer=b"{}", at=NOW + 1)
    return batch


async def _cancelled_at_once(world: World) -> Batch:
    batch = await world.validating(idempotency_key="one")
    await world.store.cancel_batch(batch.project_id, batch.id, at=NOW + 1)
    return batch


async def everything(world: World, batch: Batch, *, epoch: int, shard: Shard) -> None:
    """Make every call that can change a batch, as a process does that missed the end of the batch."""
    store, later = world.store, NOW + 3 * DAY
    again = world.new_batch(await world.owner(), idempotency_key="one")
    await world.pass_time(2 * LEASE)
    for call in (
        store.start_batch(batch.id, epoch=epoch, shards=cut([1]), total=1, work_key="w", at=later),
        store.fail_batch(batch.id, epoch=epoch, errors=b"[]", answer=b"late", at=later),
        store.drop_batch(batch.id, epoch=epoch),
        store.renew_batch(batch.id, epoch=epoch, owner=ME, lease=LEASE),
        store.begin_batch(again, owner=ME, lease=LEASE, since=NOW - DAY),
        store.cancel_batch(batch.project_id, batch.id, at=later),
        store.record(batch.id, owner=ME, progress=[moved_on(shard, [0])[1]], segment=segment(1), at=NOW),
        store.release(batch.id, owner=ME, shards=[(shard.n, shard.epoch)]),
        store.renew_shards(owner=ME, lease=LEASE),
        world.rescue(OTHER),
        store.fail_interrupted(owner=OTHER, errors=b"[]", answer=b"late", at=later),
        world.expire(at=later),
        store.claim(owner=OTHER, lease=LEASE, lines=99, bytes=1 << 30, alone=True, at=NOW),
        store.lease_finalizable(owner=OTHER, lease=LEASE, at=later),
        store.publish(batch.id, epoch=epoch, owner=ME, files=[], completed=0, failed=0, at=later),
        world.expire_files(owner=OTHER, at=later, limit=9),
    ):
        with suppress(LeaseLost):
            await call


@pytest.mark.rule("C11", "Nothing ever leaves a terminal state.")
@pytest.mark.parametrize(("reach", "end"), [*ENDINGS, (_failed, "failed"), (_cancelled_at_once, "cancelled")])
@pytest.mark.parametrize("forgotten", [False, True])
async def test_nothing_leaves_a_terminal_state(world: World, reach: Reach, end: str, forgotten: bool) -> None:
    """C11, A11: no later call changes a terminal batch or the answer to its create."""
    batch = await reach(world)
    if (finish := await world.store.lease_finalizable(owner=ME, lease=LEASE, at=NOW)) is not None:
        await world.publish(finish)
    if forgotten:
        await world.store.delete_work(batch.id)
    seen, created = await world.seen(batch), await world.store.create_record(batch.id)
    assert seen.status == end
    assert seen.status in TERMINAL
    shard = Shard(batch_id=batch.id, n=0, offset=0, length=1, lines=2, model="m", settled=b"\0", epoch=1, strikes=0)
    for epoch in range(seen.epoch + 2):
        await everything(world, batch, epoch=epoch, shard=shard)
        assert await world.seen(batch) == seen
    assert await world.store.create_record(batch.id) == created
