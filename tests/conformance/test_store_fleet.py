"""The processes of a fleet, which share caps through the store: one suite for every store."""

import asyncio

import pytest

from batchline.domain.fleet import ModelQueue, Report, UpstreamLoad
from batchline.domain.progress import Pause
from batchline.domain.records import QueueState
from batchline.domain.waiting import WaitReason
from tests.support.stores import LEASE, World

pytestmark = pytest.mark.anyio


def _report(owner: str, *, in_flight: int = 0, live: int = 0, works: bool = True) -> Report:
    return Report(
        owner=owner, runs_batches=works, upstream_loads={"gpu": UpstreamLoad(in_flight=in_flight, sync_calls=live)}
    )


async def _heartbeat(world: World, report: Report, *, cap: int = 10) -> int:
    caps = {"gpu": cap} if report.runs_batches else {}
    return (await world.store.heartbeat(report, caps=caps, lease=LEASE)).get("gpu", 0)


async def test_a_cap_is_shared_and_never_passed(world: World) -> None:
    """F2: a new process gets what the others have given back, and waits for the rest of its share."""
    assert await _heartbeat(world, _report("a")) == 10
    assert await _heartbeat(world, _report("b")) == 0
    assert await _heartbeat(world, _report("a", in_flight=8)) == 5
    assert await _heartbeat(world, _report("b")) == 2
    assert await _heartbeat(world, _report("a", in_flight=5)) == 5
    assert await _heartbeat(world, _report("b", in_flight=2)) == 5


async def test_who_leaves_or_falls_silent_gives_its_share_back(world: World) -> None:
    for owner in ("a", "b", "a", "b"):
        await _heartbeat(world, _report(owner))
    await world.store.leave("a")
    assert await _heartbeat(world, _report("b")) == 10
    assert await _heartbeat(world, _report("c")) == 0
    await world.pass_time(LEASE + 1)
    assert await _heartbeat(world, _report("c")) == 10


async def test_calls_of_others_that_somebody_waits_for_go_first(world: World) -> None:
    """D8: the reports include processes that run no batches and have no share."""
    assert await _heartbeat(world, _report("api", live=4, works=False)) == 0
    assert await _heartbeat(world, _report("a")) == 6


async def test_reports_are_told_as_they_were_given_while_they_hold(world: World) -> None:
    load = UpstreamLoad(
        in_flight=3,
        limit=8,
        pauses=[Pause(upstream="gpu", model="n", detail="refused", since=5)],
        hold=WaitReason.QUARANTINE,
        queues={"m": ModelQueue(reason=WaitReason.RATE_LIMIT, lines=4, rate=2.5)},
        projects={"p": 3},
    )
    report = Report(
        owner="a",
        runs_batches=True,
        upstream_loads={"gpu": load, "idle": UpstreamLoad()},
        batches={"batch_1": 3},
        retrying={"batch_1": 2},
        unrecorded={"batch_2": 1},
    )
    await _heartbeat(world, report)
    assert await world.store.reports() == [report]
    await world.pass_time(LEASE + 1)
    assert await world.store.reports() == []


async def test_many_who_speak_at_once_keep_the_cap(world: World) -> None:
    """F2: heartbeats at the same moment never grant more than the cap."""
    owners = [f"worker-{n}" for n in range(8)]
    for _ in range(3):
        allowed = await asyncio.gather(*(_heartbeat(world, _report(owner), cap=20) for owner in owners))
        assert sum(allowed) <= 20
    assert sorted(allowed) == [2, 2, 2, 2, 3, 3, 3, 3]


async def test_lines_that_nobody_holds_are_counted(world: World) -> None:
    """F5: an autoscaler needs the number of waiting lines of all batches."""
    assert (await world.store.queue_state()).lines == 0
    await world.running(shards=(4, 6))
    assert (await world.store.queue_state()).lines == 10
    await world.claim(lines=1)
    assert (await world.store.queue_state()).lines == 6


async def test_open_batches_are_counted_and_the_oldest_and_the_nearest_are_known(world: World) -> None:
    """F5: an alert needs to know which batch may not end in its window."""
    assert await world.store.queue_state() == QueueState(
        lines=0,
        open_batches={"validating": 0, "in_progress": 0, "finalizing": 0, "cancelling": 0},
        oldest_created_at=None,
        nearest_expires_at=None,
    )
    first = await world.running(shards=(4,))
    await world.pass_time(10)
    second = await world.running(shards=(4,))
    state = await world.store.queue_state()
    assert state.open_batches == {"validating": 0, "in_progress": 2, "finalizing": 0, "cancelling": 0}
    assert (state.oldest_created_at, state.nearest_expires_at) == (first.created_at, first.expires_at)
    await world.claim(lines=1)
    state = await world.store.queue_state()
    assert (state.oldest_created_at, state.nearest_expires_at) == (second.created_at, first.expires_at)
