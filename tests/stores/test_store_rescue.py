"""What a dead process leaves behind, behind every store: SPEC C6, D2 (dlq_exhausted), D5."""

import random

import pytest

from batchline.domain.bitmap import unsettled
from batchline.domain.errors import LeaseLost
from batchline.domain.records import Shard
from batchline.domain.states import BatchStatus
from stores.world import LEASE, ME, NOW, OTHER, World, cut, key, scenario

ERRORS, ANSWER = b'{"object":"list","data":[]}', b'{"error":{}}'


def lines_left(shards: list[Shard]) -> list[tuple[int, int]]:
    """The lines that shards still have to run, as (where in the work file, position)."""
    return [(shard.offset, position) for shard in shards for position in unsettled(shard.settled, shard.lines)]


async def open_shards(world: World) -> list[Shard]:
    """Everything there is to claim, taken one by one where it must run alone."""
    taken: list[Shard] = []
    while more := await world.claim(holder="reader"):
        taken += more
    return taken


async def die(world: World, shards: int = 1) -> None:
    """A worker takes what it can get and dies; another finds what it left."""
    assert len(await world.claim(holder=OTHER)) == shards
    assert await world.store.rescue(owner=ME) == shards


@scenario
async def test_what_a_dead_worker_held_is_found_at_once(world: World) -> None:
    """D5: and only that; no lease of one's own, or already handed back."""
    await world.running(shards=[1, 1, 1])
    (mine,) = await world.claim(lines=1)
    await world.claim(holder=OTHER, lines=1)
    assert await world.store.rescue(owner=ME) == 1
    assert await world.store.rescue(owner=ME) == 0
    assert await world.store.renew_shards(owner=ME, lease=LEASE) == {key(mine)}


@pytest.mark.parametrize("lines", [2, 3, 4, 5, 8, 9, 63, 256])
@scenario
async def test_a_dead_workers_shard_is_split_without_losing_or_doubling_a_line(world: World, lines: int) -> None:
    """C12, D5: the pieces have exactly the lines that were not recorded, each in one piece, each with a strike."""
    batch = await world.running(shards=[3, lines])
    _, shard = await world.claim(holder=OTHER)
    settled = sorted(random.Random(lines).sample(range(lines), lines // 3))
    await world.record(shard, settled, failed=len(settled) // 2)
    before = await world.seen(batch)
    assert await world.store.rescue(owner=ME) == 2
    pieces = [piece for piece in await open_shards(world) if piece.offset == shard.offset]
    expected = [(shard.offset, position) for position in range(lines) if position not in settled]
    assert sorted(lines_left(pieces)) == expected
    assert 1 < len(pieces) <= 4
    assert {(piece.length, piece.lines, piece.model, piece.strikes) for piece in pieces} == {
        (shard.length, lines, "m", 1)
    }
    assert len({piece.n for piece in pieces}) == len(pieces)
    after = await world.seen(batch)
    assert (after.completed, after.failed) == (before.completed, before.failed)


@scenario
async def test_pieces_end_a_batch_with_every_line_counted_once(world: World) -> None:
    """C12: after deaths at every stage."""
    batch = await world.running(shards=[9])
    (shard,) = await world.claim(holder=OTHER)
    await world.record(shard, [4])
    assert await world.store.rescue(owner=ME) == 1
    await die(world)
    await world.record_all(await open_shards(world))
    finish = await world.finish()
    assert (finish.leftovers, finish.batch.completed, finish.batch.total) == ([], 9, batch.total)


@scenario
async def test_a_piece_that_kills_again_is_split_again_until_its_line_is_alone(world: World) -> None:
    """D5: its last two strikes are its own, struck when nothing else was there to blame; the others run."""
    await world.running(shards=[16])
    guilty, alone = 11, 0
    for _ in range(20):
        shards = await world.claim(holder=OTHER)
        if not shards:
            break
        (shard,) = shards
        left = unsettled(shard.settled, shard.lines)
        alone += left == [guilty]
        if guilty in left:
            assert await world.store.rescue(owner=ME) == 1
        else:
            await world.record_all([shard])
    finish = await world.finish()
    assert alone == 2
    assert [(left.strikes, *unsettled(left.settled, left.lines)) for left in finish.leftovers] == [(3, guilty)]
    assert finish.batch.completed == 15


@scenario
async def test_a_single_line_is_given_up_at_its_third_strike(world: World) -> None:
    """D2, D5: twice it is tried again."""
    batch = await world.running(shards=[1])
    for _ in range(2):
        await die(world)
        assert await world.store.next_finish(owner=ME, lease=LEASE, at=NOW) is None
    await die(world)
    assert await world.claim() == []
    finish = await world.finish()
    assert [(left.strikes, left.lines) for left in finish.leftovers] == [(3, 1)]
    assert (finish.batch.id, finish.batch.status) == (batch.id, BatchStatus.FINALIZING)


@pytest.mark.parametrize("lines", [1, 5])
@scenario
async def test_a_lease_that_lapsed_under_a_living_owner_is_no_strike(world: World, lines: int) -> None:
    """D5: outages of the database are nobody's fault: reopened whole, and the late holder is fenced off."""
    await world.running(shards=[lines])
    for _ in range(4):
        (shard,) = await world.claim()
        world.pass_time(LEASE - 1)
        assert await world.store.rescue(owner=ME) == 0
        world.pass_time(2)
        assert await world.store.rescue(owner=ME) == 1
        with pytest.raises(LeaseLost):
            await world.record(shard, [0])
    (again,) = await world.claim(alone=False)
    assert (again.n, again.strikes, len(unsettled(again.settled, again.lines))) == (0, 0, lines)


@pytest.mark.parametrize("died", [True, False])
@scenario
async def test_a_stopped_batchs_lost_shard_is_closed(world: World, died: bool) -> None:
    """C11: what died unrecorded never runs again; that is no strike, and no split."""
    batch = await world.running(shards=[4])
    (shard,) = await world.claim(holder=OTHER)
    await world.record(shard, [3])
    await world.store.cancel_batch(batch.project_id, batch.id, at=NOW)
    world.pass_time(LEASE + 1)
    assert await world.store.rescue(owner=ME if died else OTHER) == 1
    assert await world.claim() == []
    (left,) = (await world.finish()).leftovers
    assert (left.strikes, unsettled(left.settled, left.lines)) == (0, [0, 1, 2])


@scenario
async def test_a_death_after_the_last_record_strikes_nobody(world: World) -> None:
    """C12: a shard that is done stays done."""
    batch = await world.running(shards=[2])
    await world.record_all(await world.claim(holder=OTHER))
    assert await world.store.rescue(owner=ME) == 0
    assert (await world.finish()).batch.id == batch.id


@scenario
async def test_a_validation_whose_process_died_has_failed(world: World) -> None:
    """C6, A11: with an answer to give again; the late process cannot start it."""
    dead, alive = await world.validating(holder=OTHER), await world.validating()
    assert await world.store.interrupt(owner=ME, errors=ERRORS, answer=ANSWER, at=NOW + 7) == 1
    assert await world.store.interrupt(owner=ME, errors=ERRORS, answer=ANSWER, at=NOW + 8) == 0
    seen = await world.seen(dead)
    assert (seen.status, seen.failed_at, seen.errors) == (BatchStatus.FAILED, NOW + 7, ERRORS)
    created = await world.store.created(dead.id)
    assert created is not None
    assert (created.answer_status, created.answer_body) == (400, ANSWER)
    with pytest.raises(LeaseLost):
        await world.store.start_batch(dead.id, epoch=1, shards=cut([1]), total=1, work_key="w", at=NOW)
    with pytest.raises(LeaseLost):
        await world.store.renew_batch(dead.id, epoch=1, owner=OTHER, lease=LEASE)
    assert await world.seen(alive) == alive


@scenario
async def test_a_validation_is_interrupted_only_when_its_lease_lapsed(world: World) -> None:
    """C6: one that is renewed may take as long as it likes."""
    batch = await world.validating()
    for _ in range(3):
        world.pass_time(LEASE - 1)
        assert await world.store.interrupt(owner=ME, errors=ERRORS, answer=ANSWER, at=NOW) == 0
        await world.store.renew_batch(batch.id, epoch=1, owner=ME, lease=LEASE)
    world.pass_time(LEASE + 1)
    assert await world.store.interrupt(owner=ME, errors=ERRORS, answer=ANSWER, at=NOW) == 1


@scenario
async def test_only_validation_can_be_interrupted(world: World) -> None:
    """C11: a batch that runs is in nobody's hands."""
    batch = await world.running()
    world.pass_time(10 * LEASE)
    assert await world.store.interrupt(owner=OTHER, errors=ERRORS, answer=ANSWER, at=NOW) == 0
    assert await world.seen(batch) == batch
