"""The progress of a batch in every store: errors by code, and the number of lines recorded over time."""

import asyncio

import pytest

from batchline.domain.errors import LeaseLost
from batchline.domain.progress import LineErrors, ProgressSample
from batchline.domain.records import Batch
from batchline.ports import BatchSnapshot
from tests.support.stores import ME, NOW, OTHER, World, cut, moved_on, segment

pytestmark = pytest.mark.anyio


def _errors(code: str, count: int, sample: bytes = b"{}") -> LineErrors:
    return LineErrors(code=code, count=count, sample=sample)


async def _snapshot(world: World, batch: Batch) -> BatchSnapshot:
    snapshot = await world.store.snapshot(batch.project_id, batch.id)
    assert snapshot is not None
    assert snapshot.batch == await world.seen(batch)
    return snapshot


async def _told(world: World, batch: Batch) -> list[LineErrors]:
    return (await _snapshot(world, batch)).errors


async def test_a_batch_stands_in_its_project_alone(world: World) -> None:
    """A8: another project's batch looks like one that does not exist."""
    batch, other = await world.running(), await world.owner("beta")
    assert await world.store.snapshot(other.project_id, batch.id) is None
    assert await world.store.snapshot(batch.project_id, "batch_none") is None


async def test_a_batch_that_nothing_is_recorded_of_has_neither_errors_nor_samples(world: World) -> None:
    for batch in (await world.validating(), await world.running()):
        snapshot = await _snapshot(world, batch)
        assert (snapshot.errors, snapshot.samples) == ([], [])


async def test_errors_add_up_by_code_and_keep_the_first_sample(world: World) -> None:
    """Errors are counted per batch, the most frequent first."""
    batch, other = await world.running(shards=[9]), await world.running(shards=[9])
    held = {shard.batch_id: shard for shard in await world.claim()}
    for batch_id, codes in ((batch.id, ["b", "a", "b"]), (other.id, ["b"])):
        for n, code in enumerate(codes):
            held[batch_id], progress = moved_on(held[batch_id], [n], failed=1)
            errors = [_errors(code, 1, b"%d" % n)]
            await world.store.record(
                batch_id, owner=ME, progress=[progress], segment=segment(1, failed=1), errors=errors, at=NOW
            )
    assert await _told(world, batch) == [_errors("b", 2, b"0"), _errors("a", 1, b"1")]
    assert await _told(world, other) == [_errors("b", 1, b"0")]


async def test_what_a_zombie_records_counts_nowhere(world: World) -> None:
    """C12, D5: if the lease is lost, neither errors nor samples are recorded."""
    batch = await world.running()
    (shard,) = await world.claim(holder=OTHER)
    await world.die(OTHER)
    await world.rescue()
    _, progress = moved_on(shard, [0], failed=1)
    with pytest.raises(LeaseLost):
        await world.store.record(
            batch.id, owner=OTHER, progress=[progress], segment=segment(1, failed=1), errors=[_errors("a", 1)], at=NOW
        )
    snapshot = await _snapshot(world, batch)
    assert (snapshot.errors, snapshot.samples) == ([], [])


async def test_errors_of_lines_that_never_ran_are_published_with_the_end(world: World) -> None:
    """C10, C12: only the holder of the epoch adds them, once; they are kept after the work is deleted."""
    batch = await world.running(shards=[4, 3])
    (shard,) = await world.claim(lines=1)
    _, progress = moved_on(shard, [0, 1, 2, 3], failed=2)
    await world.store.record(
        batch.id,
        owner=ME,
        progress=[progress],
        segment=segment(4, failed=2),
        errors=[_errors("a", 2, b"first")],
        at=NOW,
    )
    await world.store.cancel_batch(batch.project_id, batch.id, at=NOW)
    old = await world.finish(holder=OTHER)
    await world.die(OTHER)
    new = await world.finish()
    left = [_errors("batch_cancelled", 1), _errors("batch_cancelled", 1), _errors("a", 1, b"later")]
    for finish in (old, new, new):
        try:
            await world.store.publish(
                batch.id, epoch=finish.epoch, owner=finish.owner, files=[], completed=2, failed=5, errors=left, at=NOW
            )
        except LeaseLost:
            continue
    ended = await _snapshot(world, batch)
    assert ended.errors == [_errors("a", 3, b"first"), _errors("batch_cancelled", 2)]
    assert sum(each.count for each in ended.errors) == ended.batch.failed == 5
    await world.store.delete_work(batch.id)
    assert await _told(world, batch) == ended.errors


async def test_lines_are_counted_in_buckets_of_five_seconds(world: World) -> None:
    """Samples count the lines of all shards, failed or not."""
    batch = await world.running(shards=[6, 2])
    first, second = await world.claim()
    first = await world.record(first, [0, 1], failed=1, at=NOW)
    await world.record(second, [0, 1], at=NOW + 4)
    await world.record(first, [2, 3, 4], at=NOW + 5)
    samples = (await _snapshot(world, batch)).samples
    assert samples == [ProgressSample(at=NOW, lines=4), ProgressSample(at=NOW + 5, lines=3)]


async def test_the_last_sixty_buckets_are_kept_and_go_with_the_work(world: World) -> None:
    batch, other = await world.running(shards=[63]), await world.running(shards=[1], model="n")
    shard, beside = await world.claim()
    await world.record(beside, [0])
    for n in range(62):
        shard = await world.record(shard, [n], at=NOW + 5 * n)
    samples = (await _snapshot(world, batch)).samples
    assert [sample.at for sample in samples] == [NOW + 5 * n for n in range(2, 62)]
    await world.record(shard, [62], at=NOW + 5000)
    assert (await _snapshot(world, batch)).samples == [ProgressSample(at=NOW + 5000, lines=1)]
    await world.store.delete_work(batch.id)
    assert (await _snapshot(world, batch)).samples == []
    assert (await _snapshot(world, other)).samples == [ProgressSample(at=NOW, lines=1)]


async def test_models_are_those_of_lines_that_may_still_run(world: World) -> None:
    """Only the models of open and leased shards are listed."""
    batch = await world.validating()
    shards = [*cut([2, 2], model="b"), *cut([2], model="a")]
    await world.store.start_batch(batch.id, epoch=1, shards=shards, total=6, work_key="work", at=NOW)
    held = {shard.model: shard for shard in await world.claim()}
    assert (await _snapshot(world, batch)).models == ["a", "b"]
    await world.record_all([held["a"]])
    assert (await _snapshot(world, batch)).models == ["b"]
    await world.store.release(batch.id, owner=ME, shards=[(n, held["b"].epoch) for n in (0, 1)])
    assert (await _snapshot(world, batch)).models == ["b"]
    await world.store.cancel_batch(batch.project_id, batch.id, at=NOW)
    assert (await _snapshot(world, batch)).models == []


async def test_counts_and_errors_are_of_one_moment(world: World) -> None:
    """C8: in every snapshot the errors sum to the number of failed lines."""
    batch = await world.running(shards=[40])
    (shard,) = await world.claim()

    async def run() -> None:
        held = shard
        for n in range(40):
            held, progress = moved_on(held, [n], failed=1)
            errors = [_errors("ab"[n % 2], 1)]
            await world.store.record(
                batch.id, owner=ME, progress=[progress], segment=segment(1, failed=1), errors=errors, at=NOW
            )

    running = asyncio.create_task(run())
    while not running.done():
        snapshot = await world.store.snapshot(batch.project_id, batch.id)
        assert snapshot is not None
        assert sum(each.count for each in snapshot.errors) == snapshot.batch.failed
    await running
