"""Compares the clock of the machine with the time of the store, and logs when they differ."""

import logging

from batchline.ports import WatchedClock
from batchline.telemetry.metrics import Metrics

CHECK_INTERVAL_SECONDS = 5.0

log = logging.getLogger(__name__)


class ClockWatch:
    """Checks the clock in every step. A problem is logged when it begins and when it ends."""

    def __init__(self, *, clock: WatchedClock, metrics: Metrics) -> None:
        self._clock = clock
        self._had_problem = self._was_held = False
        metrics.watch(
            clock_offset_seconds=lambda: clock.state.ahead_seconds, clock_held=lambda: float(clock.state.held)
        )

    async def step(self) -> bool:
        """Compare the clocks."""
        state = await self._clock.check()
        has_problem = state.problem is not None
        if (has_problem, state.held) != (self._had_problem, self._was_held):
            self._had_problem, self._was_held = has_problem, state.held
            ahead_seconds = round(state.ahead_seconds)
            if has_problem:
                log.warning(
                    "the clock of this machine is not the time that decides",
                    extra={"ahead_seconds": ahead_seconds, "held": state.held, "reason": state.problem},
                )
            else:
                log.info("the clock is trusted again", extra={"ahead_seconds": ahead_seconds})
        return False
