"""Rescue from dead processes in every store: rules C6, D2 (dlq_exhausted), D5."""

import random

import pytest

from batchline.domain.bitmap import unsettled
from batchline.domain.errors import LeaseLost
from batchline.domain.records import Shard
from batchline.domain.states import BatchStatus
from tests.support.stores import LEASE, ME, NOW, OTHER, World, cut, key

pytestmark = pytest.mark.anyio

ERRORS, ANSWER = b'{"object":"list","data":[]}', b'{"error":{}}'


def lines_left(shards: list[Shard]) -> list[tuple[int, int]]:
    """Return the lines that shards still have to run, as (offset in the work file, position)."""
    return [(shard.offset, position) for shard in shards for position in unsettled(shard.settled, shard.lines)]


async def open_shards(world: World) -> list[Shard]:
    """Claim everything; shards that must run alone are claimed one by one."""
    taken: list[Shard] = []
    while more := await world.claim(holder="reader"):
        taken += more
    return taken


async def die(world: World, shards: int = 1) -> None:
    """Let a worker claim what it can get and die, and rescue its shards."""
    assert len(await world.claim(holder=OTHER)) == shards
    await world.die(OTHER)
    assert await world.rescue() == shards


@pytest.mark.rule("D5", "A dead worker's lines are found at once.")
async def test_what_a_dead_worker_held_is_found_at_once(world: World) -> None:
    """D5: only shards of dead processes are rescued; neither own leases nor released shards."""
    await world.running(shards=[1, 1, 1])
    (mine,) = await world.claim(lines=1)
    await world.claim(holder=OTHER, lines=1)
    await world.die(OTHER)
    assert await world.rescue() == 1
    assert await world.rescue() == 0
    assert await world.store.renew_shards(owner=ME, lease=LEASE) == {key(mine)}


@pytest.mark.rule("D5", "What a living process of the service holds is its own.")
async def test_who_lives_keeps_what_it_holds(world: World) -> None:
    """D5: a live process keeps its shards, however long its lease could not be renewed."""
    await world.running(shards=[1, 1, 1])
    (mine,) = await world.claim(lines=1)
    (its,) = await world.claim(holder="hand", lines=1)
    await world.claim(holder=OTHER, lines=1)
    for holder in ("hand", OTHER):
        await world.die(holder)
    assert await world.rescue(ME, "hand") == 1
    assert await world.store.renew_shards(owner=ME, lease=LEASE) == {key(mine)}
    assert await world.store.renew_shards(owner="hand", lease=LEASE) == {key(its)}
    await world.die("hand")
    assert await world.rescue() == 1


@pytest.mark.rule("C12", "A split shard loses and doubles no line.")
@pytest.mark.parametrize("lines", [2, 3, 4, 5, 8, 9, 63, 256])
async def test_a_dead_workers_shard_is_split_without_losing_or_doubling_a_line(world: World, lines: int) -> None:
    """C12, D5: the pieces have exactly the lines that were not recorded, each in one piece, each with a strike."""
    batch = await world.running(shards=[3, lines])
    _, shard = await world.claim(holder=OTHER)
    settled = sorted(random.Random(lines).sample(range(lines), lines // 3))
    await world.record(shard, settled, failed=len(settled) // 2)
    before = await world.seen(batch)
    await world.die(OTHER)
    assert await world.rescue() == 2
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


async def test_pieces_end_a_batch_with_every_line_counted_once(world: World) -> None:
    """C12: workers die at every stage: with the whole shard, with several pieces, and with a single piece."""
    batch = await world.running(shards=[25])
    (shard,) = await world.claim(holder=OTHER)
    await world.record(shard, [4])
    await world.die(OTHER)
    assert await world.rescue() == 1
    await die(world, shards=4)
    await die(world)
    await world.record_all(await open_shards(world))
    finish = await world.finish()
    assert (finish.leftovers, finish.batch.completed, finish.batch.total) == ([], 25, batch.total)


@pytest.mark.parametrize(("lines", "deaths"), [(1, 3), (2, 3), (16, 3), (64, 4), (256, 5)])
async def test_a_piece_that_kills_again_is_split_again_until_its_line_is_alone(
    world: World, lines: int, deaths: int
) -> None:
    """D5: the line that kills its workers gets its last strike when it runs alone.

    The other lines run, although they were struck beside it as often.
    """
    await world.running(shards=[lines])
    guilty, held_at_death = lines * 2 // 3, []
    while shards := await world.claim(holder=OTHER):
        left = [position for _, position in lines_left(shards)]
        if guilty in left:
            held_at_death.append(len(left))
            await world.die(OTHER)
            assert await world.rescue() == len(shards)
        else:
            await world.record_all(shards)
    finish = await world.finish()
    assert (len(held_at_death), held_at_death[-1]) == (deaths, 1)
    assert [(left.strikes, *unsettled(left.settled, left.lines)) for left in finish.leftovers] == [(3, guilty)]
    assert finish.batch.completed == lines - 1


@pytest.mark.rule("D5", "Three strikes, then a line is given up.")
async def test_a_single_line_is_given_up_at_its_third_strike(world: World) -> None:
    """D2, D5: a line is tried again after its first and second strike."""
    batch = await world.running(shards=[1])
    for _ in range(2):
        await die(world)
        assert await world.store.lease_finalizable(owner=ME, lease=LEASE, at=NOW) is None
    await die(world)
    assert await world.claim() == []
    finish = await world.finish()
    assert [(left.strikes, left.lines) for left in finish.leftovers] == [(3, 1)]
    assert (finish.batch.id, finish.batch.status) == (batch.id, BatchStatus.FINALIZING)


@pytest.mark.rule("D5", "Outages of the database are no strike.")
@pytest.mark.parametrize("renewed", [True, False])
async def test_a_living_owners_lease_never_lapses(world: World, renewed: bool) -> None:
    """D5: an outage of the database causes no strike, although leases could not be renewed for long.

    Lines that were answered during the outage are recorded after it.
    """
    batch = await world.running(shards=[2])
    (shard,) = await world.claim()
    for _ in range(4):
        await world.pass_time(LEASE + 1)
        if renewed:
            assert await world.store.renew_shards(owner=ME, lease=LEASE) == {key(shard)}
        assert await world.rescue() == 0
    await world.record(shard, [1])
    await world.store.release(batch.id, owner=ME, shards=[(shard.n, shard.epoch)])
    (again,) = await world.claim(alone=False)
    assert (again.n, again.strikes, unsettled(again.settled, again.lines)) == (0, 0, [0])


async def test_a_stopped_batchs_lost_shard_is_closed(world: World) -> None:
    """C11: lines of a stopped batch that were not recorded never run again; the shard gets no strike and no split."""
    batch = await world.running(shards=[4])
    (shard,) = await world.claim(holder=OTHER)
    await world.record(shard, [3])
    await world.store.cancel_batch(batch.project_id, batch.id, at=NOW)
    await world.die(OTHER)
    assert await world.rescue() == 1
    assert await world.claim() == []
    (left,) = (await world.finish()).leftovers
    assert (left.strikes, unsettled(left.settled, left.lines)) == (0, [0, 1, 2])


async def test_a_death_after_the_last_record_strikes_nobody(world: World) -> None:
    """C12: a shard that is done stays done."""
    batch = await world.running(shards=[2])
    await world.record_all(await world.claim(holder=OTHER))
    await world.die(OTHER)
    assert await world.rescue() == 0
    assert (await world.finish()).batch.id == batch.id


@pytest.mark.rule("C6", "A batch whose validating process died has failed.")
async def test_a_validation_whose_process_died_has_failed(world: World) -> None:
    """C6, A11: the failed batch has an answer for repeated creates, and the late process cannot start it."""
    dead, alive = await world.validating(holder=OTHER), await world.validating()
    await world.die(OTHER)
    failed = await world.store.fail_interrupted(owner=ME, errors=ERRORS, answer=ANSWER, at=NOW + 7)
    assert await world.store.fail_interrupted(owner=ME, errors=ERRORS, answer=ANSWER, at=NOW + 8) == []
    seen = await world.seen(dead)
    assert failed == [seen]
    assert (seen.status, seen.failed_at, seen.errors) == (BatchStatus.FAILED, NOW + 7, ERRORS)
    created = await world.store.create_record(dead.id)
    assert created is not None
    assert (created.answer_status, created.answer_body) == (400, ANSWER)
    with pytest.raises(LeaseLost):
        await world.store.start_batch(dead.id, epoch=1, shards=cut([1]), total=1, work_key="w", at=NOW)
    with pytest.raises(LeaseLost):
        await world.store.renew_batch(dead.id, epoch=1, owner=OTHER, lease=LEASE)
    assert await world.seen(alive) == alive


async def test_a_validation_is_interrupted_only_when_its_lease_lapsed(world: World) -> None:
    """C6: validation whose lease is renewed may take any time."""
    batch = await world.validating()
    for _ in range(3):
        await world.pass_time(LEASE / 2)
        assert await world.store.fail_interrupted(owner=ME, errors=ERRORS, answer=ANSWER, at=NOW) == []
        await world.store.renew_batch(batch.id, epoch=1, owner=ME, lease=LEASE)
    await world.pass_time(LEASE + 1)
    assert len(await world.store.fail_interrupted(owner=ME, errors=ERRORS, answer=ANSWER, at=NOW)) == 1


async def test_only_validation_can_be_interrupted(world: World) -> None:
    """C11: a batch in progress has no owner, so it is never interrupted."""
    batch = await world.running()
    await world.pass_time(10 * LEASE)
    assert await world.store.fail_interrupted(owner=OTHER, errors=ERRORS, answer=ANSWER, at=NOW) == []
    assert await world.seen(batch) == batch
