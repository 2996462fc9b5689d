"""Which lines start, wait or fail when a budget has too little left for all of them (D4, G8)."""

from typing import cast

from batchline.domain.estimates import Estimate
from batchline.domain.money import Tariff
from batchline.pipeline.budget import Budgets
from batchline.pipeline.dispatch.completion import Completer
from batchline.pipeline.dispatch.funding import Funding
from batchline.pipeline.dispatch.in_flight import InFlight
from batchline.pipeline.dispatch.limiter import Limiter
from batchline.pipeline.dispatch.queues import ReadyQueue
from batchline.pipeline.job import Job
from batchline.pipeline.record import Recorder
from batchline.pipeline.routing import SyncCalls
from tests.support.clocks import SettableClock
from tests.support.dispatchers import RecorderStub
from tests.support.jobs import make_jobs


class Scene:
    """Lines of one batch that cost 10 each, an organization with money, and possibly a limit of the batch."""

    def __init__(self, *, funds: int, cost_left: int | None = None, lines: int = 4) -> None:
        self.clock, self.recorder, self.made_ready = SettableClock(), RecorderStub(), list[Job]()
        self.ready = ReadyQueue()
        self.in_flight = InFlight(Limiter(cap=16), clock=self.clock, sync_calls=SyncCalls())
        completer = Completer(
            recorder=cast(Recorder, self.recorder),
            tariff=Tariff(metered=True, batch_percent=50),
            on_line_dropped=lambda: None,
        )
        self.funding = Funding(
            ready=self.ready, in_flight=self.in_flight, completer=completer, make_ready=self.made_ready.append
        )
        self.jobs, budgets = make_jobs(lines), Budgets(metered=True)
        budgets.of("o").update_balance(funds, read_at=0)
        batch = self.jobs[0].batch
        batch.budget, batch.pending_lines = budgets.of_batch("o", "p", cost_left=cost_left), lines
        for job in self.jobs:
            job.estimate = Estimate(10, 10)
            completer.acquire(job)

    def start(self, job: Job, *, must_start: bool = False) -> bool:
        if may_start := self.funding.hold(job, must_start=must_start):
            self.in_flight.start([job])
        return may_start

    def end(self, job: Job) -> None:
        self.in_flight.finish(job, None, self.clock.steady())
        self.funding.release(job)


def test_a_project_waits_while_lines_in_flight_hold_the_rest() -> None:
    """D4: the line that did not start is the next one again once some money is released."""
    scene = Scene(funds=25)
    first, second, third, _ = scene.jobs
    assert [scene.start(job) for job in (first, second, third)] == [True, True, False]
    assert (set(scene.funding.waiting_projects), len(scene.ready)) == ({"p"}, 1)
    scene.end(first)
    assert set(scene.funding.waiting_projects) == set()
    assert scene.start(third)


def test_a_line_that_nothing_in_flight_can_make_room_for_fails() -> None:
    """D4: nobody holds the rest, so it would wait for ever."""
    scene = Scene(funds=5)
    assert not scene.start(scene.jobs[0])
    assert len(scene.recorder.errors) == 1
    assert len(scene.ready) == 0


def test_a_line_that_must_start_does_and_holds_nothing() -> None:
    """Others wait for the answer of a probe."""
    scene = Scene(funds=10)
    probe = scene.jobs[1]
    assert [scene.start(scene.jobs[0]), scene.start(probe, must_start=True)] == [True, True]
    assert probe.held == 0


def test_lines_wait_for_the_limit_of_their_batch_and_not_their_project() -> None:
    """G8: other batches of the project go on. The end of a line lets two be tried, and no line left lets all."""
    scene = Scene(funds=1000, cost_left=25, lines=6)
    first, second, *rest = scene.jobs
    assert [scene.start(job) for job in scene.jobs] == [True, True] + [False] * 4
    assert set(scene.funding.waiting_projects) == set()
    scene.end(first)
    assert scene.made_ready == rest[:2]
    scene.end(second)
    assert scene.made_ready == rest


def test_new_money_lets_every_batch_try_again() -> None:
    scene = Scene(funds=1000, cost_left=10, lines=2)
    assert not scene.funding.on_funds_changed()
    assert [scene.start(job) for job in scene.jobs] == [True, False]
    assert scene.funding.on_funds_changed()
    assert scene.made_ready == scene.jobs[1:]
    assert not scene.funding.on_funds_changed()


def test_lines_of_a_stopped_batch_are_withdrawn() -> None:
    scene = Scene(funds=1000, cost_left=10)
    for job in scene.jobs:
        scene.start(job)
    assert scene.funding.withdraw(lambda job: job is scene.jobs[2]) == [scene.jobs[2]]
    assert scene.funding.withdraw(lambda _: True) == [scene.jobs[1], scene.jobs[3]]
    scene.end(scene.jobs[0])
    assert scene.made_ready == []
