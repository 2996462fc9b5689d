"""A fleet in memory: what holds for one in a store holds here, but for time: who is over is known."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from batchline.app.workers.pool import MemoryFleet
from batchline.domain.fleet import Report, UpstreamLoad

_LEASE = 30.0


def _report(owner: str, *, in_flight: int = 0, live: int = 0) -> Report:
    return Report(
        owner=owner, runs_batches=True, upstream_loads={"gpu": UpstreamLoad(in_flight=in_flight, sync_calls=live)}
    )


async def _send(fleet: MemoryFleet, report: Report, *, cap: int = 10) -> int:
    return (await fleet.heartbeat(report, caps={"gpu": cap}, lease=_LEASE))["gpu"]


def _play(scene: Coroutine[Any, Any, None]) -> None:
    asyncio.run(scene)


def test_who_is_alone_has_the_whole_cap_at_once() -> None:
    """F2: nothing changes for a service that never starts a worker process."""

    async def scene() -> None:
        assert await _send(MemoryFleet(), _report("serve")) == 10

    _play(scene())


@pytest.mark.rule("F2", "A cap holds over all processes of a service.")
def test_a_cap_is_shared_and_never_passed() -> None:
    """F2: room is made when a worker process is started; it gets what was released, and waits for the rest."""

    async def scene() -> None:
        fleet = MemoryFleet()
        await _send(fleet, _report("serve", in_flight=10))
        fleet.join("worker")
        assert await _send(fleet, _report("serve", in_flight=8)) == 5
        assert await _send(fleet, _report("worker")) == 2
        assert await _send(fleet, _report("serve", in_flight=5)) == 5
        assert await _send(fleet, _report("worker", in_flight=2)) == 5

    _play(scene())


def test_a_silent_one_keeps_its_share_until_it_is_over() -> None:
    """F2: it may still have in flight what it was allowed."""

    async def scene() -> None:
        fleet = MemoryFleet()
        for owner in ("serve", "worker", "serve", "worker"):
            await _send(fleet, _report(owner))
        for _ in range(3):
            assert await _send(fleet, _report("serve")) == 5
        await fleet.leave("worker")
        assert await _send(fleet, _report("serve")) == 10
        await fleet.leave("nobody")

    _play(scene())


def test_calls_that_somebody_waits_for_leave_less_to_hands() -> None:
    """D8: they are made in the serving process, and are not its lines."""

    async def scene() -> None:
        fleet = MemoryFleet()
        fleet.join("worker")
        await _send(fleet, _report("serve", live=4))
        assert await _send(fleet, _report("worker")) == 3

    _play(scene())


@pytest.mark.rule("D5", "A further process lives before it can claim anything.")
def test_who_was_sent_for_lives_before_it_says_a_word() -> None:
    """D5: and until it is over, so that its leases are nobody else's."""

    async def scene() -> None:
        fleet = MemoryFleet()
        fleet.join("worker")
        assert fleet.live_owners() == ["worker"]
        report = _report("worker", in_flight=3)
        await _send(fleet, report)
        assert fleet.live_owners() == ["worker"]
        assert await fleet.reports() == [report]
        await fleet.leave("worker")
        assert (fleet.live_owners(), await fleet.reports()) == ([], [])

    _play(scene())
