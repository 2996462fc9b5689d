"""How many jobs may start beside those in flight, and who may exceed the limit (D8, D9)."""

import pytest

from batchline.domain.outcomes import Retryable, Success
from batchline.pipeline.dispatch.in_flight import InFlight
from batchline.pipeline.dispatch.limiter import Limiter
from batchline.pipeline.job import Job
from batchline.pipeline.routing import SyncCalls
from tests.support.clocks import SettableClock
from tests.support.jobs import make_jobs


class Slots:
    """Jobs in flight below a cap, with the synchronous calls that the test begins. Without a cap the limit is 32."""

    def __init__(self, *, cap: int | None = 16) -> None:
        self.clock, self.sync_calls = SettableClock(), SyncCalls()
        self.in_flight = InFlight(Limiter(cap=cap), clock=self.clock, sync_calls=self.sync_calls)

    def call(self, calls: int, project_id: str = "p") -> None:
        """Begin synchronous calls of a project."""
        for _ in range(calls):
            self.sync_calls.begin(project_id)

    def start(self, lines: int, project_id: str = "p", *, model: str = "m") -> list[Job]:
        jobs = make_jobs(lines, project_id=project_id, model=model)
        self.in_flight.start(jobs)
        return jobs

    def run(self, jobs: list[Job], *, seconds: float) -> None:
        self.in_flight.start(jobs)
        self.clock.advance(seconds)
        for job in jobs:
            assert self.in_flight.finish(job, None, self.clock.steady()) == pytest.approx(seconds)

    def end(self, job: Job) -> None:
        self.in_flight.finish(job, None, self.clock.steady())

    def exceeding(self, *project_ids: str, model: str = "m") -> list[str]:
        """Return the projects of which a line of a model may start beyond the limit, the next one first."""
        return [project_id for project_id, _ in self.in_flight.may_exceed([(name, model) for name in project_ids])]

    def fill(self, project_id: str, *, model: str = "m") -> int:
        """Start as many lines of a lane beyond the limit as may start, and return how many are in flight then."""
        while self.exceeding(project_id, model=model):
            self.start(1, project_id, model=model)
        return self.in_flight.by_lane[project_id, model]

    def end_one(self, project_id: str, *, model: str = "m") -> None:
        lane = project_id, model
        self.end(next(job for job in self.in_flight if (job.batch.project_id, job.model.id) == lane))


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
    slots.call(calls)
    assert slots.in_flight.room == room


@pytest.mark.rule("D8", "Calls of one project leave the lines of another their even share of the slots.")
@pytest.mark.parametrize(("cap", "lines"), [(8, 4), (16, 8), (None, 16)])
def test_calls_of_a_project_take_no_more_than_its_share_from_another(cap: int | None, lines: int) -> None:
    """D8: its clients may read so slowly that they take very long."""
    slots = Slots(cap=cap)
    slots.call(40, "calling")
    assert slots.in_flight.room == 1
    slots.start(1, "other")
    assert slots.in_flight.room == slots.in_flight.room_of("m") == lines - 1
    slots.start(lines - 1, "other")
    assert slots.in_flight.room == 0


def test_each_project_with_calls_has_a_share() -> None:
    slots = Slots()
    slots.call(40, "calling")
    slots.call(40, "third")
    slots.start(1, "other")
    assert slots.in_flight.room == 16 - 2 * 5 - 1


def test_few_calls_take_their_slots_and_no_more() -> None:
    slots = Slots()
    slots.call(2, "calling")
    slots.call(1, "other")
    slots.start(3, "third")
    assert slots.in_flight.room == 16 - 3 - 3


@pytest.mark.parametrize("lines", [0, 1])
def test_calls_of_a_project_go_before_its_own_lines(lines: int) -> None:
    slots = Slots()
    slots.call(15)
    slots.start(lines)
    assert slots.in_flight.room == 1 - lines


@pytest.mark.rule("D8", "While answers are slow one slot below the cap stays free for projects that have none.")
def test_while_answers_are_slow_one_slot_stays_free() -> None:
    """D8: lines that hang must not keep another project's from starting. At first answers count as slow."""
    slots = Slots()
    assert slots.in_flight.limit_of("p") == 15
    slots.run(make_jobs(1), seconds=0.1)
    assert slots.in_flight.limit_of("p") == 16
    slots.run(make_jobs(16), seconds=5.0)
    assert slots.in_flight.limit_of("p") == 15


def test_a_project_whose_lines_hang_leaves_the_slot_to_those_with_quick_answers() -> None:
    """D8: also if most answers are quick."""
    slots = Slots()
    slots.start(8, "hanging")
    slots.clock.advance(10.0)
    slots.run(make_jobs(8, project_id="quick"), seconds=0.1)
    assert [slots.in_flight.limit_of(project) for project in ("hanging", "quick")] == [7, 8]


@pytest.mark.parametrize(("cap", "limit"), [(7, 7), (8, 7), (None, 32)])
def test_no_slot_stays_free_below_a_small_cap_or_below_none(cap: int | None, limit: int) -> None:
    """D8: one of few slots is much, and without a cap the limit may be exceeded."""
    assert Slots(cap=cap).in_flight.limit_of("p") == limit


@pytest.mark.rule("D9", "A project that has nothing in flight may exceed the limit, but never the cap.")
def test_a_project_that_has_nothing_in_flight_may_exceed_the_limit() -> None:
    """D8, D9: by one, so a project whose lines hang keeps no other from starting."""
    slots, capped = Slots(cap=None), Slots(cap=16)
    slots.start(32, "hanging")
    assert slots.in_flight.room == 0
    assert slots.exceeding("hanging", "a", "b") == ["a", "b"]
    slots.start(1, "a")
    assert slots.exceeding("hanging", "a", "b") == ["b"]
    capped.start(15, "hanging")
    assert capped.exceeding("hanging", "a") == ["a"]
    capped.start(1, "a")
    assert capped.exceeding("hanging", "b") == []


@pytest.mark.rule("D8", "A model that has nothing in flight does not wait for other models of its project.")
def test_a_model_that_has_nothing_in_flight_may_exceed_the_limit() -> None:
    """D8: after those projects that have nothing in flight at all."""
    slots = Slots(cap=None)
    slots.start(32, model="slow")
    assert slots.in_flight.may_exceed([("p", "slow"), ("p", "quick"), ("other", "quick")]) == [
        ("other", "quick"),
        ("p", "quick"),
    ]
    slots.start(1, model="quick")
    assert slots.exceeding("p", model="quick") == []


def test_synchronous_calls_leave_nothing_below_the_cap_to_exceed_with() -> None:
    slots = Slots()
    slots.start(10, "hanging")
    slots.call(6)
    assert slots.exceeding("a") == []


def test_a_project_that_is_answered_beyond_the_limit_gets_its_share_of_it() -> None:
    """D8: its lines end while those of another hang, so the upstream has enough for it."""
    slots = Slots(cap=None)
    slots.start(32, "hanging")
    allowed = []
    for _ in range(6):
        allowed.append(slots.fill("live"))
        slots.clock.advance(2.0)
        slots.end_one("live")
    assert allowed == [1, 2, 4, 8, 16, 16]


def test_a_project_with_many_models_leaves_the_share_of_another_as_it_is() -> None:
    """D8: the slots are shared by project first."""
    slots = Slots(cap=None)
    slots.start(32, "hanging")
    for number in range(15):
        slots.start(1, "hanging", model=f"m{number}")
    allowed = 0
    for _ in range(6):
        allowed = slots.fill("live")
        slots.clock.advance(2.0)
        slots.end_one("live")
    assert allowed >= 16


def test_what_idle_lanes_may_have_beyond_the_limit_is_forgotten_once_there_is_room() -> None:
    """Clients name models as they like, so a process meets any number of lanes."""
    slots = Slots(cap=None)
    hanging = slots.start(32, "hanging")
    for number in range(3):
        slots.fill("live", model=f"m{number}")
        slots.clock.advance(2.0)
        slots.end_one("live", model=f"m{number}")
    assert slots.fill("live", model="m0") == 2, "it is idle, and others still have all slots"
    while slots.in_flight.by_project["live"]:
        slots.end_one("live", model="m0")
    for job in hanging:
        slots.end(job)
    slots.start(32, "hanging")
    assert [slots.fill("live", model=f"m{number}") for number in range(3)] == [1, 1, 1]


def test_a_refusal_beyond_the_limit_is_no_answer() -> None:
    """D9: a project that is refused gets no further slots by that."""
    slots = Slots(cap=None)
    slots.start(32, "hanging")
    (job,) = slots.start(1, "live")
    slots.clock.advance(2.0)
    slots.in_flight.finish(job, Retryable("http_429", "reason", throttled=True), slots.clock.steady())
    assert slots.fill("live") == 1


@pytest.mark.rule("D8", "A model has slots of its own beside a slower one that has taken all that it may have.")
def test_a_model_does_not_wait_for_the_slots_of_another() -> None:
    slots = Slots(cap=None)
    slots.start(32, model="slow")
    assert slots.exceeding("p", model="quick") == ["p"]
    slots.start(1, model="quick")
    assert slots.in_flight.room > 0
    assert slots.in_flight.room_of("slow") == 0
    assert slots.in_flight.room_of("quick") > 0


@pytest.mark.parametrize(("calls", "room"), [(0, 22), (5, 17), (100, -9)])
def test_synchronous_calls_leave_one_slot_to_each_model(calls: int, room: int) -> None:
    """D8: ten lines are in flight of a model that may have 32."""
    slots = Slots(cap=None)
    slots.start(10)
    slots.call(calls)
    assert slots.in_flight.room_of("m") == room


def test_a_lane_exceeds_the_limit_of_its_model_only_beside_others_of_it() -> None:
    """D9: its own lines would only wait for each other."""
    slots = Slots(cap=None)
    slots.start(40)
    slots.start(40, model="slow")
    for _ in range(3):
        slots.clock.advance(2.0)
        slots.end_one("p")
    assert slots.exceeding("p") == []
    assert slots.exceeding("q") == ["q"]


def test_the_limit_is_not_exceeded_further_while_the_lines_of_others_end_as_soon() -> None:
    """D8: then a slot is free soon. It would be the same with two names of one engine."""
    slots = Slots(cap=None)
    others = slots.start(32, "others")
    (live,) = slots.start(1, "live")
    slots.clock.advance(2.0)
    slots.end(others[0])
    slots.start(1, "others")
    slots.end(live)
    slots.start(1, "live")
    assert slots.exceeding("live") == []


def test_quick_answers_need_more_ready_lines_than_slots() -> None:
    """Before the first answer, and while answers are slow, one line for each slot is enough."""
    slots = Slots()
    assert slots.in_flight.lines_for(1.0) == 16
    slots.run(make_jobs(1), seconds=5.0)
    assert slots.in_flight.lines_for(1.0) == 16
    quick = Slots()
    quick.run(make_jobs(1), seconds=0.5)
    assert quick.in_flight.lines_for(1.0) == 32


@pytest.mark.parametrize(("kind", "throttled"), [("broken", False), ("http_429", True)])
def test_a_throttled_end_limits_its_model_and_a_broken_one_does_not(kind: str, throttled: bool) -> None:
    """D3, D9: a broken connection says nothing about how much the upstream can take."""
    limiter, clock = Limiter(cap=16), SettableClock()
    in_flight = InFlight(limiter, clock=clock, sync_calls=SyncCalls())
    jobs = make_jobs(16)
    in_flight.start(jobs)
    clock.advance(0.1)
    for job in jobs:
        in_flight.finish(job, Retryable(kind, "reason", throttled=throttled), clock.steady())
    assert limiter.model("m").is_limited is throttled
    assert not limiter.model("other").is_limited


def test_a_line_was_refused_before_also_if_that_spent_nothing() -> None:
    """D9: otherwise lines that pass when they are tried again would seem to pass at once."""
    limiter, clock = Limiter(cap=64), SettableClock()
    in_flight = InFlight(limiter, clock=clock, sync_calls=SyncCalls())
    refusal = Retryable("http_429", "reason", throttled=True)
    for _ in range(12):
        jobs = make_jobs(16)
        in_flight.start(jobs)
        clock.advance(0.1)
        for job in jobs:
            in_flight.finish(job, refusal, clock.steady())
            job.last_fault = refusal
        in_flight.start(jobs)
        clock.advance(0.1)
        lane = jobs[0].batch.project_id, jobs[0].model.id
        in_flight.finish_answered([(job, Success(200, None, b"")) for job in jobs], lane, clock.steady())
        assert not any(job.throttles for job in jobs)
    assert not limiter.model("m").is_limited


def test_an_end_that_says_nothing_is_no_refusal() -> None:
    """D3: what the limiter said about an earlier attempt does not count for this one."""
    limiter, clock = Limiter(cap=64), SettableClock()
    in_flight = InFlight(limiter, clock=clock, sync_calls=SyncCalls())
    (job,) = make_jobs(1)
    job.refusal_cost = 0.0
    in_flight.start([job])
    in_flight.finish(job, None, clock.steady())
    assert job.refusal_cost is None


@pytest.mark.parametrize("kind", ["http_408", "http_502", "http_504", "timeout"])
def test_fewer_are_in_flight_if_the_upstream_is_too_slow_for_as_many(kind: str) -> None:
    """A gateway answers 408 or 504 if the server behind it takes too long, and some servers do so themselves."""
    slots = Slots(cap=None)
    jobs = slots.start(32)
    slots.clock.advance(30.0)
    for job in jobs:
        slots.in_flight.finish(job, Retryable(kind, ""), slots.clock.steady())
    assert slots.in_flight.room == 16
