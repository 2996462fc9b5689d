"""How many more lines a dispatcher wants, of whom, and when it asks for them (D3, D8, D9)."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from batchline.domain.outcomes import Retryable
from batchline.domain.records import SHARED_LANE, Lane
from batchline.domain.replies import Answer, Fault, FaultKind
from tests.support.dispatchers import DispatcherHarness
from tests.support.jobs import FAR_FUTURE, make_jobs

REFUSED = Fault(kind=FaultKind.REFUSED, detail="connection refused")
THROTTLED = Answer(status=429, body=b'{"error":{"message":"too many requests"}}')
EVERYTHING_OF_P = Lane(model=None, project_id="p")


@pytest.fixture
def harness() -> Iterator[DispatcherHarness]:
    with closing(DispatcherHarness(cap=4)) as harness:
        yield harness


def test_twice_as_many_lines_are_wanted_as_may_be_in_flight(harness: DispatcherHarness) -> None:
    assert harness.dispatcher.wanted_lines == 8


def test_a_model_of_a_project_with_enough_ready_lines_is_satisfied(harness: DispatcherHarness) -> None:
    """D8: of other projects lines are still claimed, and of other models, which may start while these wait."""
    harness.add(make_jobs(7, expires_at=FAR_FUTURE))
    assert harness.dispatcher.satisfied_lanes == set()
    harness.add(make_jobs(1, expires_at=FAR_FUTURE))
    assert harness.dispatcher.satisfied_lanes == {Lane(model=model, project_id="p") for model in ("m", SHARED_LANE)}
    assert harness.dispatcher.wanted_lines == 8


def test_more_is_asked_for_as_soon_as_a_project_is_no_longer_satisfied(harness: DispatcherHarness) -> None:
    """Otherwise slots would stay free until the next poll."""
    harness.add(make_jobs(8, expires_at=FAR_FUTURE))
    assert harness.demands == 0
    harness.reply(REFUSED)
    assert harness.dispatcher.satisfied_lanes == set()
    assert harness.demands == 1


@pytest.mark.rule("D9", "A model that is held back keeps no other model of its project from being claimed.")
def test_lines_of_a_model_that_is_held_back_do_not_satisfy_its_project(harness: DispatcherHarness) -> None:
    """D9: they cannot start, so the project's other models need lines too."""
    harness.add(make_jobs(100, model="limited", expires_at=FAR_FUTURE))
    for _ in range(3):
        harness.advance(0.1)
        harness.reply(THROTTLED)
    assert harness.dispatcher.satisfied_lanes == {Lane(model="limited", project_id="p")}
    harness.add(make_jobs(8, model="other", expires_at=FAR_FUTURE))
    satisfied = {Lane(model=model, project_id="p") for model in ("limited", "other", SHARED_LANE)}
    assert harness.dispatcher.satisfied_lanes == satisfied


def test_many_lines_that_are_held_back_satisfy_the_shared_lane(harness: DispatcherHarness) -> None:
    """A claim cannot leave out one model of that lane: without a bound, all of its lines would be claimed."""
    harness.add(make_jobs(4000, model="limited", expires_at=FAR_FUTURE))
    for _ in range(3):
        harness.advance(0.1)
        harness.reply(THROTTLED)
    held_back = {Lane(model="limited", project_id="p")}
    assert harness.dispatcher.satisfied_lanes == held_back
    harness.add(make_jobs(200, model="limited", expires_at=FAR_FUTURE))
    assert harness.dispatcher.satisfied_lanes == held_back | {Lane(model=SHARED_LANE, project_id="p")}


def test_lines_of_a_paused_model_do_not_satisfy_its_project(harness: DispatcherHarness) -> None:
    """D3: one that was never tried is enough to probe with. Some of those that were tried may never be answered."""
    harness.add(make_jobs(4, model="gone", expires_at=FAR_FUTURE))
    harness.advance(1.0)
    for job in make_jobs(15, model="gone"):
        harness.breakers.on_unavailable(job, Retryable(FaultKind.REFUSED, "connection refused", unavailable=True))
        harness.breakers.on_real_answers("there")
    harness.reply(REFUSED)
    assert harness.dispatcher.satisfied_lanes == set()
    (untried,) = make_jobs(1, model="gone", expires_at=FAR_FUTURE)
    harness.add([untried])
    assert harness.dispatcher.satisfied_lanes == {Lane(model="gone", project_id="p")}
    assert harness.dispatcher.wanted_lines == 8


@pytest.mark.rule("D8", "Lines of a project that wait for a retry keep nobody else's from being claimed.")
def test_many_lines_that_wait_for_a_retry_satisfy_their_project_alone(harness: DispatcherHarness) -> None:
    """D8: 4,096 of them are held at most, since each takes memory."""
    harness.add(make_jobs(1, project_id="other", expires_at=FAR_FUTURE))
    for job in make_jobs(4096):
        harness.dispatcher._completer.acquire(job)
        harness.dispatcher._retries.add(job, until=FAR_FUTURE)
    assert harness.dispatcher.satisfied_lanes == {EVERYTHING_OF_P}
    assert harness.dispatcher.wanted_lines == 8
    harness.call(lambda: harness.dispatcher._retries.withdraw(lambda job: job.position == 0))
    assert harness.dispatcher.satisfied_lanes == set()


def test_many_bytes_satisfy_their_project_alone(harness: DispatcherHarness) -> None:
    """D8: 32 MiB of a project are held at most."""
    harness.add(make_jobs(1, project_id="other", expires_at=FAR_FUTURE))
    harness.dispatcher._completer.bytes_by_project["p"] = 32 * 1024 * 1024
    assert harness.dispatcher.satisfied_lanes == {EVERYTHING_OF_P}


@pytest.mark.rule("D3", "A paused upstream is probed with a line of each project and model.")
def test_a_paused_upstream_wants_a_line_of_each_project_and_model(harness: DispatcherHarness) -> None:
    """D3: the others wait in the store, where another worker can claim them."""
    harness.breaker.on_crash()
    assert harness.dispatcher.wanted_lines > 0
    for project_id, model in (("a", "m"), ("a", "n"), ("b", "m")):
        harness.add(make_jobs(1, project_id=project_id, model=model, expires_at=FAR_FUTURE))
    assert harness.dispatcher.satisfied_lanes == {
        Lane(model="m", project_id="a"),
        Lane(model="n", project_id="a"),
        Lane(model="m", project_id="b"),
    }
    assert harness.dispatcher.wanted_lines > 0, "of others"


def test_the_end_of_a_pause_asks_for_more(harness: DispatcherHarness) -> None:
    harness.breaker.on_crash()
    harness.add(make_jobs(2, expires_at=FAR_FUTURE))
    assert harness.demands == 0
    harness.call(lambda: harness.dispatcher.on_real_answers("m"))
    assert (harness.dispatcher.wanted_lines, harness.demands) == (8, 1)


def test_a_dispatcher_that_drains_wants_nothing(harness: DispatcherHarness) -> None:
    """F5."""
    harness.call(harness.dispatcher.drain)
    assert harness.dispatcher.wanted_lines == 0
