"""Probes whether another limit on the requests in flight has a better throughput."""

from math import log, sqrt
from statistics import fmean

from batchline.pipeline.dispatch.limiter.noise import Noise
from batchline.pipeline.dispatch.limiter.rounds import Measure

UP_FACTOR, _DOWN_FACTOR, _FAR_DOWN_FACTOR = 1.33, 0.8, 0.6
"""The factors of a probe up, down and far down. The first probes down go far if the upstream seems to queue."""
_SHORTEST_REST_SECONDS, _LONGEST_REST_SECONDS = 2.0, 30.0
"""The time between probes. It doubles while they change nothing."""
_SMALL_ERROR, _MOST_TRIES = 0.08, 6
"""There are so many tries at most, while the error of the mean change is larger than this and the change is near the
one that decides. A single try has a smaller error if only the latencies of requests vary."""
_CLEAR, _CLEAR_IF_WORSE = 2.0, 0.5
"""How near that is, in errors. A lower limit that seems worse is left sooner: it would only shorten a queue, and each
try costs throughput."""


class Probe:
    """Tries another limit for one round, between two rounds at the present one, and schedules the next probe.

    If the throughput varies so much that one try shows little, more of them follow: each ends where the next begins.
    """

    def __init__(self) -> None:
        self.upwards = True
        self.is_only_down = False
        """Whether no higher limit is probed."""
        self.home = self.limit = 1
        """The limit to return to, and the one to try."""
        self.during: Measure | None = None
        self._before: Measure | None = None
        self._changes: list[float] = []
        """The change of throughput of each try, as a logarithm."""
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
        self._before, self.home, self._is_far, self._changes = before, before.limit, far, []
        if lowest >= self.home:
            self.upwards = True
        elif self.home >= cap:
            self.upwards = False
        if self.upwards:
            self.limit = max(self.home + 1, int(self.home * UP_FACTOR))
        else:
            self.limit = min(self.home - 1, lowest if far else max(lowest, int(self.home * self._down_factor)))

    def compare(self, after: Measure, noise: Noise) -> tuple[float, float]:
        """Return the mean change of throughput in the tries of this probe, as a logarithm, and its error."""
        if self._before is None or self.during is None:
            raise RuntimeError("a probe ended that had not begun")
        self._changes.append(log(self.during.rate / sqrt(self._before.rate * after.rate)))
        noise.add(self._before, after)
        error = sqrt(noise.error(self.during) ** 2 + (noise.error(self._before) ** 2 + noise.error(after) ** 2) / 4)
        self._before = after
        return fmean(self._changes), error / sqrt(len(self._changes))

    def is_unclear(self, change: float, error: float, *, least: float) -> bool:
        """Return whether another try is needed to know if the change is at least this."""
        near = (_CLEAR if self.upwards or change > least else _CLEAR_IF_WORSE) * error
        return error > _SMALL_ERROR and abs(change - least) < near and len(self._changes) < _MOST_TRIES

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
