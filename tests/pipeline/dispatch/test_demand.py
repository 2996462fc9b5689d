"""How many more lines a dispatcher wants, and when it asks for them (D3, D8)."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from batchline.domain.replies import Fault, FaultKind
from tests.support.dispatchers import DispatcherHarness
from tests.support.jobs import FAR_FUTURE, make_jobs

REFUSED = Fault(kind=FaultKind.REFUSED, detail="connection refused")


@pytest.fixture
def harness() -> Iterator[DispatcherHarness]:
    with closing(DispatcherHarness(cap=4)) as harness:
        yield harness


def test_twice_as_many_lines_are_wanted_as_may_be_in_flight(harness: DispatcherHarness) -> None:
    assert harness.dispatcher.wanted_lines == 8


def test_a_project_with_enough_ready_lines_is_satisfied(harness: DispatcherHarness) -> None:
    """D8: of other projects lines are still claimed."""
    harness.add(make_jobs(7, expires_at=FAR_FUTURE))
    assert harness.dispatcher.satisfied_projects == set()
    harness.add(make_jobs(1, expires_at=FAR_FUTURE))
    assert harness.dispatcher.satisfied_projects == {"p"}
    assert harness.dispatcher.wanted_lines == 8


def test_more_is_asked_for_as_soon_as_a_project_is_no_longer_satisfied(harness: DispatcherHarness) -> None:
    """Otherwise slots would stay free until the next poll."""
    harness.add(make_jobs(8, expires_at=FAR_FUTURE))
    assert harness.demands == 0
    harness.reply(REFUSED)
    assert harness.dispatcher.satisfied_projects == set()
    assert harness.demands == 1


def test_a_paused_upstream_wants_one_line_to_be_probed_with(harness: DispatcherHarness) -> None:
    """D3: the others wait in the store, where another worker can claim them."""
    harness.breaker.on_crash()
    assert harness.dispatcher.wanted_lines == 1
    harness.add(make_jobs(1, expires_at=FAR_FUTURE))
    assert harness.dispatcher.wanted_lines == 0


def test_the_end_of_a_pause_asks_for_more(harness: DispatcherHarness) -> None:
    harness.breaker.on_crash()
    harness.add(make_jobs(2, expires_at=FAR_FUTURE))
    assert (harness.dispatcher.wanted_lines, harness.demands) == (0, 0)
    harness.breaker.on_real_answer()
    harness.call(harness.dispatcher._demand.on_upstream_answer)
    assert (harness.dispatcher.wanted_lines, harness.demands) == (8, 1)


def test_a_dispatcher_that_drains_wants_nothing(harness: DispatcherHarness) -> None:
    """F5."""
    harness.call(harness.dispatcher.drain)
    assert harness.dispatcher.wanted_lines == 0
