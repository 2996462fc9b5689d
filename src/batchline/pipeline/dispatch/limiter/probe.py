"""Probes whether another limit on the requests in flight has a better throughput."""

from math import log, sqrt

from batchline.pipeline.dispatch.limiter.rounds import Measure

UP_FACTOR, _DOWN_FACTOR, _FAR_DOWN_FACTOR = 1.33, 0.8, 0.6
"""The factors of a probe up, down and far down. The first probes down go far if the upstream seems to queue."""
_SHORTEST_REST_SECONDS, _LONGEST_REST_SECONDS = 2.0, 30.0
"""The time between probes. It doubles while they change nothing."""


class Probe:
    """Tries another limit for one round, between two rounds at the present one, and schedules the next try."""

    def __init__(self) -> None:
        self.upwards = True
        self.is_only_down = False
        """Whether no higher limit is probed."""
        self.home = self.limit = 1
        """The limit to return to, and the one to try."""
        self.during: Measure | None = None
        self._before: Measure | None = None
        self._rest_seconds = _SHORTEST_REST_SECONDS
        self._due = 0.0
        self._down_factor = _FAR_DOWN_FACTOR
        self._is_far = False

    def is_due(self, now: float) -> bool:
        return now >= self._due

    def schedule_up(self) -> None:
        self.upwards, self._due = True, 0.0

    def begin_descent(self, now: float, *, far: bool) -> None:
        """Probe lower limits first."""
        self.upwards, self._down_factor, self._due = False, _FAR_DOWN_FACTOR if far else _DOWN_FACTOR, now
        self._rest_seconds = _SHORTEST_REST_SECONDS

    def begin(self, before: Measure, *, cap: int, lowest: int, far: bool = False) -> None:
        """Begin to try a higher limit, or a lower one that is at least ``lowest``, or exactly that if it may be far."""
        self._before, self.home, self._is_far = before, before.limit, far
        if lowest >= self.home:
            self.upwards = True
        elif self.home >= cap:
            self.upwards = False
        if self.upwards:
            self.limit = max(self.home + 1, int(self.home * UP_FACTOR))
        else:
            self.limit = min(self.home - 1, lowest if far else max(lowest, int(self.home * self._down_factor)))

    def change(self, after: Measure) -> tuple[float, float]:
        """Return the change of throughput during the probe, as a logarithm, and its error."""
        if self._before is None or self.during is None:
            raise RuntimeError("a probe ended that had not begun")
        usual = sqrt(self._before.rate * after.rate)
        error = sqrt(self.during.error**2 + (self._before.error**2 + after.error**2) / 4)
        return log(self.during.rate / usual), error

    def on_nothing_changed(self, now: float) -> None:
        """Rest, and probe in the other direction next. After a probe in each direction the rest is twice as long."""
        if self.upwards or self.is_only_down or self._is_far:
            self._rest_seconds = min(_LONGEST_REST_SECONDS, 2 * self._rest_seconds)
        self.upwards, self._down_factor = not (self.upwards or self.is_only_down), _DOWN_FACTOR
        self.rest(now)

    def on_fewer_enough(self, now: float) -> None:
        """Probe a still lower limit at once."""
        self._rest_seconds, self._due = _SHORTEST_REST_SECONDS, now

    def rest(self, now: float) -> None:
        self._due = now + self._rest_seconds
