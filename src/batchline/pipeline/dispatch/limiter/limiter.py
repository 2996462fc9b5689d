"""Limits the requests of one process to one upstream.

The dispatcher asks before every start and reports every start and end. The time is always a parameter.
"""

from enum import Enum

from batchline.pipeline.dispatch.limiter.concurrency import ConcurrencyLimit
from batchline.pipeline.dispatch.limiter.rate import RateLimit
from batchline.pipeline.dispatch.limiter.throughput import Measure, Start, ThroughputMeter

_DEFAULT_CAP = 1024
_MIN_USED_PART = 0.9
"""If less than this part of the limit was in flight, there was too little to do, and a measurement says nothing."""
_MAX_REFUSED_PART = 0.05
"""A measurement with more refusals than this per answer says nothing either."""
_OVERLOADED_PART = 0.25
"""The part of the last ends that makes an overload, out of one round of them but at least ``_MIN_ENDS``."""
_MIN_ENDS = 8


class Sign(Enum):
    """What the end of a request says about how much its upstream can take."""

    ANSWERED = "answered"
    """The upstream processed it, whatever the answer says."""
    THROTTLED = "throttled"
    """429."""
    OVERLOADED = "overloaded"
    """502, 503, 504 and timeouts. A few of them are no overload."""
    OTHER = "other"
    """It says nothing: a broken connection, a 500, or the request was never sent."""


class Limiter:
    """Combines a limit on the requests in flight with a limit on the starts per second."""

    def __init__(self, *, cap: int | None) -> None:
        self._cap = _DEFAULT_CAP if cap is None else cap
        self._concurrency = ConcurrencyLimit(cap=self._cap)
        self._rate = RateLimit()
        self._throughput = ThroughputMeter(self._concurrency.window)
        self._refusals = 0
        self._ends = self._overloads = 0
        self._cut_at = 0.0
        self._accepted = self._most_accepted = 0
        self._accepted_since = 0.0
        """The time of the last refusal. Since then ``_accepted`` were accepted, at most ``_most_accepted`` at once."""

    def set_cap(self, cap: int) -> None:
        """Set how many may be in flight at most. It may be 0."""
        if cap != self._cap:
            self._cap = cap
            self._concurrency.set_cap(max(1, cap))
            self._measure_anew()

    @property
    def limit(self) -> int:
        """How many may be in flight now."""
        return min(self._cap, self._concurrency.limit)

    @property
    def rate(self) -> float | None:
        """How many may start in a second now; None while that is not limited."""
        return self._rate.rate

    @property
    def most(self) -> int:
        """How many may be in flight now, including the slow ones, which ``limit`` does not count."""
        return min(self._cap, self._concurrency.limit + self._throughput.slow)

    def room(self, *, beside: int = 0) -> int:
        """Return how many more may start, if ``beside`` others are in flight that were not reported here."""
        taken = self._throughput.in_flight + beside
        return min(self._concurrency.limit - taken, self._cap - self._throughput.slow - taken)

    def wait(self, now: float) -> float:
        """Return the seconds until the rate lets the next one start."""
        return 0.0 if self._rate.rate is None else self._rate.wait(now)

    def started(self, now: float, count: int) -> list[Start]:
        """Report that so many start now. Each of the returned values is passed to ``ended`` later."""
        self._rate.started(now, count)
        return self._throughput.started(now, count)

    def ended(self, start: Start, sign: Sign, now: float) -> None:
        """Report that one has ended."""
        self._throughput.ended(start, now)
        self._ends += 1
        if sign is Sign.ANSWERED:
            self._answered(start, now)
        elif sign is Sign.THROTTLED:
            self._throttled(start, now)
        elif sign is Sign.OVERLOADED and start.at >= self._cut_at:
            self._overloaded(now)

    def _answered(self, start: Start, now: float) -> None:
        if self._rate.recent_refusals:
            self._rate.accepted()
        if start.at >= self._accepted_since:
            self._accepted += 1
            self._most_accepted = max(self._most_accepted, start.in_flight)
        measure = self._throughput.answered(start)
        if measure is not None:
            self._consider(measure, now)

    def _consider(self, measure: Measure, now: float) -> None:
        few = (_MAX_REFUSED_PART + 2 * self._rate.background) * measure.answers
        if self._refusals > few or measure.load < _MIN_USED_PART * self._concurrency.limit:
            self._concurrency.disturbed(now)
        else:
            self._concurrency.measured(measure)
        self._measure_anew()

    def _throttled(self, start: Start, now: float) -> None:
        self._refusals += 1
        if self._rate.careful and self._blames_number(start):
            self._concurrency.refused(start.in_flight, now)
            self._measure_anew()
        else:
            self._rate.refused(started=start.at, now=now)
        self._accepted = self._most_accepted = 0
        self._accepted_since = now

    def _blames_number(self, start: Start) -> bool:
        """Return whether a 429 may be about the number in flight and not about the rate.

        It may if many were accepted since the last one, but never with so many in flight. If latency is even, a limit
        on the rate looks the same, and then the remedy is the same too.
        """
        return self._accepted > 4 * start.in_flight > 4 * self._most_accepted and 2 * start.in_flight >= self.limit

    def _overloaded(self, now: float) -> None:
        recent = max(_MIN_ENDS, self._concurrency.limit)
        if self._ends > recent:
            self._ends = self._overloads = 0
        self._overloads += 1
        if self._overloads >= _OVERLOADED_PART * recent:
            self._concurrency.overloaded()
            self._cut_at = now
            self._ends = self._overloads = 0
            self._measure_anew()

    def _measure_anew(self) -> None:
        self._refusals = 0
        self._throughput.open(self._concurrency.window)
