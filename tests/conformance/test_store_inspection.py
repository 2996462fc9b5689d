"""What a check of all data reads and corrects, on every store."""

import pytest
from msgspec.structs import replace

from batchline.domain.bitmap import all_but, unsettled
from batchline.domain.errors import LeaseLost
from batchline.domain.progress import LineErrors
from batchline.domain.records import Charge, OrganizationBooks
from batchline.domain.states import FileState, Hold, ShardState
from batchline.domain.usage import Usage
from batchline.ports import InspectedBatch, UnsettledShard
from tests.support.stores import NOW, OTHER, World

pytestmark = pytest.mark.anyio
_USAGE = Usage(input_tokens=3, cached_tokens=1, output_tokens=4, reasoning_tokens=2)


async def _rows(world: World, batch_id: str) -> InspectedBatch:
    rows = await world.store.inspect_batch(batch_id)
    assert rows is not None
    return rows


async def test_all_rows_of_a_batch_are_read(world: World) -> None:
    owner = await world.owner()
    source = await world.stored(owner)
    batch = await world.running(owner, shards=(4, 2), input_file_id=source.id)
    first, _ = await world.claim()
    charge = Charge(model="m", requests=1, usage=_USAGE, cost=0)
    await world.record(first, [0, 1], failed=1, charges=[charge])
    rows = await _rows(world, batch.id)
    assert rows.batch.id == batch.id
    assert rows.batch.completed == 0, "the counts of the row itself"
    assert (rows.work_key, rows.drained, rows.failures, rows.repairs) == (f"work/{batch.id}/1", False, 0, 0)
    assert [(shard.n, shard.state, shard.completed, shard.failed) for shard in rows.shards] == [
        (0, ShardState.LEASED, 1, 1),
        (1, ShardState.LEASED, 0, 0),
    ]
    assert [segment.data for segment in rows.segments] == [None]
    assert {file.id: file.state for file in rows.files.values()} == {source.id: FileState.STORED}
    assert (rows.booked_requests, rows.booked_usage) == (1, _USAGE)
    assert rows.unclaimable == []
    assert await world.store.inspect_batch("batch_x") is None


async def test_batches_and_files_are_read_in_pages(world: World) -> None:
    owner = await world.owner()
    batches = sorted([(await world.running(owner)).id for _ in range(3)])
    files = sorted([(await world.stored(owner)).id for _ in range(3)])
    await world.store.delete_file(owner.project_id, files[0], at=NOW)
    first = await world.store.inspected_ids(after="", limit=2)
    assert first + await world.store.inspected_ids(after=first[-1], limit=2) == batches
    page = await world.store.inspect_files(after="", limit=2)
    assert [(file.id, file.state) for file in page] == [(files[0], FileState.DELETED), (files[1], FileState.STORED)]
    assert [file.id for file in await world.store.inspect_files(after=files[1], limit=2)] == files[2:]
    assert await world.store.inspect_file("file-x") is None


async def test_the_results_that_batches_name_are_read(world: World) -> None:
    owner = await world.owner()
    batch = await world.running(owner, shards=(1,))
    await world.record_all(await world.claim())
    result = world.file(owner, purpose="batch_output", object_key=f"results/{batch.id}/2-output")
    await world.publish(await world.finish(), files=[result])
    assert await world.store.named_results([batch.id, "batch_x"]) == {result.id}


async def test_money_is_set_to_the_ledger(world: World) -> None:
    owner = await world.owner()
    await world.store.set_funds(owner.organization_id, balance=100, credits=10, at=NOW)
    await world.store.charge(owner, Charge(model="m", requests=1, usage=_USAGE, cost=30), at=NOW)
    before = await world.store.books_of(owner.organization_id)
    assert before == OrganizationBooks(
        id=owner.organization_id, name="default", balance=80, credits=0, booked_balance=80, booked_credits=0
    )
    await world.store.set_to_ledger(owner.organization_id)
    assert await world.store.books_of(owner.organization_id) == before
    assert await world.store.books_of("nobody") is None


async def test_a_lost_lane_is_opened_again(world: World) -> None:
    """A claim that finds nothing closes the lane; a shard that is open after all is found by the check."""
    batch = await world.running(shards=(2, 2))
    [first] = await world.claim(lines=1)
    await world.store.open_missing_lanes(batch.id)
    assert (await _rows(world, batch.id)).unclaimable == []
    assert [shard.n for shard in await world.claim()] == [1]
    assert first.n == 0


async def test_a_batch_is_drained_if_its_shards_are(world: World) -> None:
    batch = await world.running(shards=(2,))
    await world.store.correct_drained(batch.id)
    assert not (await _rows(world, batch.id)).drained
    await world.record_all(await world.claim())
    await world.store.correct_drained(batch.id)
    assert (await _rows(world, batch.id)).drained


async def test_times_that_are_in_order_stay(world: World) -> None:
    batch = await world.running(shards=(1,))
    await world.record_all(await world.claim())
    await world.publish(await world.finish(at=NOW + 5), at=NOW + 9)
    before = (await _rows(world, batch.id)).batch
    await world.store.correct_times(batch.id)
    assert (await _rows(world, batch.id)).batch == before
    assert (before.finalizing_at, before.completed_at, before.failed_at) == (NOW + 5, NOW + 9, None)


async def test_shards_are_closed_only_of_ended_batches(world: World) -> None:
    batch = await world.running(shards=(2,))
    await world.store.close_ended_shards(batch.id)
    assert [shard.state for shard in (await _rows(world, batch.id)).shards] == [ShardState.OPEN]


async def test_a_shard_with_lost_lines_is_closed_and_its_worker_loses_it(world: World) -> None:
    batch = await world.running(shards=(4, 4))
    [first, _] = await world.claim()
    first = await world.record(first, [0, 1])
    lost = UnsettledShard(n=0, epoch=first.epoch, leased=True, former=first.settled, settled=all_but([1, 2, 3], 4))
    await world.store.hand_over(batch.id, [lost])
    [closed, other] = (await _rows(world, batch.id)).shards
    assert (closed.state, closed.settled, closed.owner) == (ShardState.CLOSED, all_but([1, 2, 3], 4), None)
    assert other.state is ShardState.LEASED
    with pytest.raises(LeaseLost):
        await world.record(first, [2])
    with pytest.raises(LeaseLost):
        await world.store.hand_over(batch.id, [lost])


async def test_other_lines_run_if_all_of_a_trial_is_handed_over(world: World) -> None:
    """G6: else they would wait until the end of the window."""
    batch = await world.running(shards=(100,), hold=Hold.TRIAL)
    [trial] = await world.claim()
    lost = UnsettledShard(n=trial.n, epoch=trial.epoch, leased=True, former=trial.settled, settled=trial.settled)
    await world.store.hand_over(batch.id, [lost])
    [rest] = await world.claim()
    assert len(unsettled(trial.settled, 100)) + len(unsettled(rest.settled, 100)) == 100


async def test_a_batch_that_could_not_be_finalized_is_tried_again_at_once(world: World) -> None:
    batch = await world.running(shards=(1,))
    await world.record_all(await world.claim())
    await world.store.defer_finalize(await world.finish(holder=OTHER), seconds=1000)
    await world.store.hand_over(batch.id, [])
    rows = await _rows(world, batch.id)
    assert (rows.failures, rows.owner) == (0, None)
    assert (await world.finish()).batch.id == batch.id


async def test_counts_of_an_ended_batch_are_corrected(world: World) -> None:
    batch = await world.running(shards=(3,))
    await world.record_all(await world.claim())
    errors = [LineErrors(code="internal_error", count=1, sample=b"{}")]
    with pytest.raises(LeaseLost):
        await world.store.correct_counts(batch, completed=2, failed=1, usage=_USAGE, errors=errors)
    await world.publish(await world.finish())
    ended = (await _rows(world, batch.id)).batch
    await world.store.correct_counts(ended, completed=2, failed=1, usage=_USAGE, errors=errors)
    rows = await _rows(world, batch.id)
    assert (rows.batch.completed, rows.batch.failed, rows.batch.usage) == (2, 1, _USAGE)
    assert rows.failed_by_code == 1
    with pytest.raises(LeaseLost):
        await world.store.correct_counts(ended, completed=3, failed=1, usage=_USAGE, errors=errors)
    other = replace(ended, output_file_id="file-other")
    with pytest.raises(LeaseLost):
        await world.store.correct_counts(other, completed=2, failed=1, usage=_USAGE, errors=errors)
