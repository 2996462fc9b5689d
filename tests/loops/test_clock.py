"""A clock in doubt is logged once, and shown by the metrics as long as it lasts."""

import logging

import pytest

from batchline.loops.clock import ClockWatch
from batchline.ports import ClockState
from batchline.telemetry.metrics import Metrics
from tests.support.clocks import SettableClock

pytestmark = pytest.mark.anyio

JUMPED = ClockState(ahead_seconds=90_000.0, held=True, problem="the clock is 25.0 hours ahead")


async def test_a_problem_is_logged_when_it_begins_and_when_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    clock = SettableClock()
    watch = ClockWatch(clock=clock, metrics=Metrics())
    with caplog.at_level(logging.INFO):
        for state in (ClockState(), JUMPED, JUMPED, JUMPED, ClockState(), ClockState()):
            clock.state = state
            assert not await watch.step()
    began, ended = caplog.records
    assert began.getMessage() == "the clock of this machine is not the time that decides"
    assert (began.__dict__["reason"], began.__dict__["held"]) == (JUMPED.problem, True)
    assert ended.getMessage() == "the clock is trusted again"


@pytest.mark.rule("F5", "Metrics show how far the clock is off, and whether anything expires.")
async def test_the_metrics_show_the_state_of_the_clock() -> None:
    clock, metrics = SettableClock(), Metrics()
    await ClockWatch(clock=clock, metrics=metrics).step()
    assert b"batchline_clock_held 0.0" in metrics.render()
    clock.state = JUMPED
    assert b"batchline_clock_held 1.0" in metrics.render()
    assert b"batchline_clock_offset_seconds 90000.0" in metrics.render()
