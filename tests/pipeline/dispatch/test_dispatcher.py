"""The dispatcher before an upstream that is unavailable: when it is probed, and with what (D3, D5)."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from batchline.domain.replies import Answer, Fault, FaultKind
from tests.simulation.virtual import EPOCH
from tests.support.dispatchers import DispatcherHarness
from tests.support.jobs import FAR_FUTURE, make_jobs

BROKEN = Fault(kind=FaultKind.BROKEN, detail="reset by peer")
REFUSED = Fault(kind=FaultKind.REFUSED, detail="connection refused")
ANSWER = Answer(status=200, body=b'{"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}')


@pytest.fixture
def harness() -> Iterator[DispatcherHarness]:
    with closing(DispatcherHarness()) as harness:
        yield harness


def crash_with_two_lines(harness: DispatcherHarness) -> None:
    """Break two lines together: the upstream is paused, the next probe is due in 2 s, and both lines are suspects."""
    harness.add(make_jobs(2, expires_at=FAR_FUTURE))
    assert harness.sent == 2
    harness.reply(BROKEN)
    harness.advance(0.25)
    assert harness.breaker.paused
    assert harness.breaker.seconds_to_probe == pytest.approx(2.0)


def test_a_probe_that_cannot_start_does_not_postpone_the_next_one(harness: DispatcherHarness) -> None:
    """D3: the time until the next probe must begin only when a probe has started.

    A suspect hangs, and the other must not start beside it, so there is nothing to probe with. The first line that
    may start does so at once, since a probe is long due.
    """
    crash_with_two_lines(harness)
    harness.advance(3.0)
    assert harness.sent == 3, "the first suspect is the first probe"
    harness.advance(60.0)
    assert harness.sent == 3, "the second suspect waits for the first"
    assert harness.breaker.seconds_to_probe == 0.0
    harness.add(make_jobs(1, project_id="other", expires_at=FAR_FUTURE))
    assert harness.sent == 4
    assert harness.breaker.seconds_to_probe == pytest.approx(4.0), "doubled, since the first probe has no reply"


def test_a_line_past_its_window_is_no_probe(harness: DispatcherHarness) -> None:
    """D3: it does not start, so the next line is the probe."""
    crash_with_two_lines(harness)
    overdue = make_jobs(1, project_id="overdue", expires_at=int(EPOCH))
    harness.add(overdue + make_jobs(1, project_id="other", expires_at=FAR_FUTURE))
    harness.advance(2.0)
    assert harness.sent == 3
    assert harness.breaker.seconds_to_probe == pytest.approx(0.25 + 2.0 - 2.0)


@pytest.mark.rule("C13", "A line whose window had ended by a clock that was wrong runs once the clock is right.")
def test_a_line_past_its_window_starts_after_the_clock_was_set_back(harness: DispatcherHarness) -> None:
    harness.add(make_jobs(2, expires_at=int(EPOCH) - 10))
    harness.advance(3.0)
    assert harness.sent == 0
    harness.clock.seconds_behind = 60.0
    harness.advance(3.0)
    assert harness.sent == 2


def test_a_recorder_that_is_full_postpones_no_probe(harness: DispatcherHarness) -> None:
    """D3: while storage is unavailable nothing starts; afterwards the probe that is due starts at once."""
    crash_with_two_lines(harness)
    harness.recorder.full = True
    harness.advance(60.0)
    assert (harness.sent, harness.breaker.seconds_to_probe) == (2, 0.0)
    harness.recorder.full = False
    harness.call(harness.dispatcher.pump)
    assert harness.sent == 3
    assert harness.breaker.seconds_to_probe == pytest.approx(5.0)


def test_a_paused_upstream_gets_one_probe_at_a_time(harness: DispatcherHarness) -> None:
    """D3: with five lines ready, one starts when their project may be probed, and one every 2 s after that."""
    crash_with_two_lines(harness)
    harness.add(make_jobs(5, project_id="other", expires_at=FAR_FUTURE))
    sent = []
    for _ in range(7):
        harness.advance(1.0)
        sent.append(harness.sent - 2)
        harness.reply(REFUSED)
    assert sent == [1, 1, 2, 2, 3, 3, 4]


@pytest.mark.rule("D9", "A broken connection of one project keeps no other project from starting within a second.")
@pytest.mark.parametrize("seconds_later", [0.0, 0.9, 1.9])
def test_a_broken_connection_keeps_no_other_project_from_starting(
    harness: DispatcherHarness, seconds_later: float
) -> None:
    """D8, D9: a line that breaks alone may have crashed the upstream, or only its own connection."""
    harness.add(make_jobs(1, expires_at=FAR_FUTURE))
    harness.reply(BROKEN)
    assert harness.breaker.paused
    harness.advance(seconds_later)
    before = harness.sent
    harness.add(make_jobs(1, project_id="other", expires_at=FAR_FUTURE))
    harness.advance(0.5)
    assert harness.sent == before + 1
    harness.reply(ANSWER)
    assert not harness.breaker.paused


@pytest.mark.rule("D9", "A project starts within a second, also if the upstream was paused just before.")
def test_a_project_that_comes_at_the_start_of_a_pause_is_probed_within_a_second(harness: DispatcherHarness) -> None:
    harness.add(make_jobs(16, expires_at=FAR_FUTURE))
    while not harness.breaker.paused:
        harness.reply(REFUSED)
        harness.advance(0.1)
    before = harness.sent
    harness.add(make_jobs(1, project_id="other", expires_at=FAR_FUTURE))
    harness.advance(1.0)
    assert harness.sent > before


def test_an_answer_to_a_probe_lets_everything_start(harness: DispatcherHarness) -> None:
    """D3: the suspects too, each with nothing else in flight."""
    crash_with_two_lines(harness)
    harness.add(make_jobs(5, project_id="other", expires_at=FAR_FUTURE))
    harness.advance(2.0)
    for _ in range(4):
        harness.reply(ANSWER)
    assert not harness.breaker.paused
    assert (len(harness.recorder.output), harness.dispatcher.waiting) == (7, 0)


@pytest.mark.rule("D1", "A line whose answer cannot be decompressed is sent once.")
def test_a_final_fault_costs_one_attempt(harness: DispatcherHarness) -> None:
    """D1: the upstream was paid for the answer, and would send the same again."""
    harness.add(make_jobs(1, expires_at=FAR_FUTURE))
    harness.reply(Fault(kind=FaultKind.UNREADABLE, detail="the encoding 'br'"))
    harness.advance(600.0)
    assert (harness.sent, harness.dispatcher.waiting) == (1, 0)
    [line] = harness.recorder.errors
    assert b"[legacy:retries_exhausted] Line failed after 1 attempts: the encoding 'br'" in line
