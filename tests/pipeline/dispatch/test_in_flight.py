"""How many jobs may start beside those in flight, and how many of one project (D8)."""

import pytest

from batchline.domain.outcomes import Retryable
from batchline.pipeline.dispatch.in_flight import InFlight
from batchline.pipeline.dispatch.limiter import Limiter
from batchline.pipeline.job import Job
from tests.support.clocks import SettableClock
from tests.support.jobs import make_jobs


class Slots:
    """Jobs in flight under a limit of 16, with as many synchronous calls as the test says."""

    def __init__(self) -> None:
        self.clock, self.sync_calls = SettableClock(), 0
        self.in_flight = InFlight(Limiter(cap=16), clock=self.clock, count_sync_calls=lambda: self.sync_calls)

    def run(self, jobs: list[Job], *, seconds: float) -> None:
        self.in_flight.start(jobs)
        self.clock.advance(seconds)
        for job in jobs:
            assert self.in_flight.finish(job, None, self.clock.steady()) == pytest.approx(seconds)


def test_every_start_takes_a_slot_and_every_end_frees_one() -> None:
    slots, jobs = Slots(), make_jobs(5)
    slots.in_flight.start(jobs)
    assert (len(slots.in_flight), slots.in_flight.room, slots.in_flight.by_project["p"]) == (5, 11, 5)
    slots.in_flight.finish(jobs[0], None, slots.clock.steady())
    assert jobs[0] not in slots.in_flight
    assert (list(slots.in_flight), slots.in_flight.room, slots.in_flight.by_project["p"]) == (jobs[1:], 12, 4)


@pytest.mark.parametrize(("calls", "room"), [(0, 16), (1, 15), (15, 1), (40, 1)])
def test_synchronous_calls_go_first_but_leave_a_slot_to_batches(calls: int, room: int) -> None:
    slots = Slots()
    slots.sync_calls = calls
    assert slots.in_flight.room == room


def test_while_answers_are_slow_a_project_leaves_one_slot_free() -> None:
    """D8: lines that hang must not keep another project's from starting. At first answers count as slow."""
    slots = Slots()
    assert slots.in_flight.project_limit == 15
    slots.run(make_jobs(1), seconds=0.1)
    assert slots.in_flight.project_limit == 16
    slots.run(make_jobs(16), seconds=5.0)
    assert slots.in_flight.project_limit == 15


def test_quick_answers_need_more_ready_lines_than_slots() -> None:
    """Before the first answer, and while answers are slow, one line for each slot is enough."""
    slots = Slots()
    assert slots.in_flight.lines_for(1.0) == 16
    slots.run(make_jobs(1), seconds=5.0)
    assert slots.in_flight.lines_for(1.0) == 16
    quick = Slots()
    quick.run(make_jobs(1), seconds=0.5)
    assert quick.in_flight.lines_for(1.0) == 32


def test_a_throttled_end_sets_a_rate_and_a_broken_one_does_not() -> None:
    """D3: a broken connection says nothing about how much the upstream can take."""
    for kind, throttled, limited in (("broken", False, False), ("http_429", True, True)):
        limiter, clock = Limiter(cap=16), SettableClock()
        in_flight = InFlight(limiter, clock=clock, count_sync_calls=lambda: 0)
        (job,) = make_jobs(1)
        in_flight.start([job])
        clock.advance(0.1)
        in_flight.finish(job, Retryable(kind, "reason", throttled=throttled), clock.steady())
        assert (limiter.rate is not None) is limited
