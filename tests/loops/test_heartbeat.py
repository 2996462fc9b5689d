"""A worker keeps to its share of a cap, and has none before the first heartbeat and after the last (F2)."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest

from batchline.domain.errors import StoreDown
from batchline.domain.fleet import Report
from batchline.loops.heartbeat import Heartbeat, SyncCallHeartbeat
from batchline.pipeline.routing import SyncRouter
from batchline.settings import Settings
from tests.support.virtual_loop import VirtualLoop

SETTINGS = Settings(upstream_url="http://default/v1", max_concurrency=8, lease_seconds=10)


@pytest.fixture
def virtual() -> Iterator[VirtualLoop]:
    with closing(VirtualLoop()) as virtual:
        yield virtual


class WorkerStub:
    """Knows its caps."""

    upstreams = ("default",)

    def __init__(self) -> None:
        self.caps: dict[str, int] = {}

    def set_cap(self, upstream: str, cap: int) -> None:
        self.caps[upstream] = cap

    def report(self) -> Report:
        return Report(owner="me", runs_batches=True)


class FleetStub:
    """Grants the same share every time, unless it is unavailable."""

    def __init__(self, share: int) -> None:
        self.share, self.down = share, False
        self.reports: list[Report] = []
        self.left: list[str] = []

    async def heartbeat(self, report: Report, *, caps: Mapping[str, int], lease: float) -> dict[str, int]:
        if self.down:
            raise StoreDown("away")
        self.reports.append(report)
        return dict.fromkeys(caps, self.share)

    async def leave(self, owner: str) -> None:
        if self.down:
            raise StoreDown("away")
        self.left.append(owner)


def new_heartbeat() -> tuple[Heartbeat, WorkerStub, FleetStub]:
    worker, fleet = WorkerStub(), FleetStub(3)
    untyped_worker: Any = worker
    return Heartbeat(fleet=fleet, worker=untyped_worker, settings=SETTINGS), worker, fleet


def test_nothing_starts_before_the_first_share_is_granted(virtual: VirtualLoop) -> None:
    heartbeat, worker, _ = new_heartbeat()
    assert worker.caps == {"default": 0}
    virtual.run(heartbeat.step())
    assert worker.caps == {"default": 3}


def test_a_share_that_is_not_renewed_ends_before_the_lease_does(virtual: VirtualLoop) -> None:
    """After the lease the other workers may use it."""
    heartbeat, worker, fleet = new_heartbeat()
    virtual.run(heartbeat.step())
    fleet.down = True
    with pytest.raises(StoreDown):
        virtual.run(heartbeat.step())
    virtual.advance(7.9)
    assert worker.caps == {"default": 3}
    virtual.advance(0.2)
    assert worker.caps == {"default": 0}


def test_a_share_that_is_renewed_lasts(virtual: VirtualLoop) -> None:
    heartbeat, worker, fleet = new_heartbeat()
    for share in (3, 5, 4):
        fleet.share = share
        virtual.run(heartbeat.step())
        virtual.advance(7)
        assert worker.caps == {"default": share}


def test_a_process_that_ends_says_so(virtual: VirtualLoop) -> None:
    """The others get its share at once, and need not wait for its lease."""
    heartbeat, _, fleet = new_heartbeat()
    virtual.run(heartbeat.leave())
    assert fleet.left == ["me"]


def test_a_worker_can_leave_without_its_store(virtual: VirtualLoop) -> None:
    """Its shares end with its lease."""
    heartbeat, _, fleet = new_heartbeat()
    fleet.down = True
    virtual.run(heartbeat.leave())
    assert fleet.left == []


def test_an_api_process_reports_its_calls_and_once_that_there_are_none_left(virtual: VirtualLoop) -> None:
    """An idle one writes nothing."""
    fleet, router = FleetStub(0), SyncRouter(clock=virtual.clock)
    heartbeat = SyncCallHeartbeat(fleet=fleet, router=router, owner="api", settings=SETTINGS)
    virtual.run(heartbeat.step())
    with router.call("default", "p"):
        virtual.run(heartbeat.step())
    for _ in range(3):
        virtual.run(heartbeat.step())
    calls = [report.upstream_loads["default"].sync_calls if report.upstream_loads else 0 for report in fleet.reports]
    assert calls == [1, 0]
    assert not any(report.runs_batches for report in fleet.reports)
