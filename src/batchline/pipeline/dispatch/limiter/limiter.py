"""One for each upstream and process: asked before every start, told of every end, with the time handed in."""

from enum import Enum

from batchline.pipeline.dispatch.limiter.concurrency import ConcurrencyLimit
from batchline.pipeline.dispatch.limiter.rate import RateLimit
from batchline.pipeline.dispatch.limiter.throughput import Measure, Start, ThroughputMeter

_MOST = 1024
_FULL = 0.9
"""With less than this of the limit in flight there was too little to do, and a measure says nothing."""
_FEW_REFUSED = 0.05
"""A measure with more refusals than this among its answers says nothing either."""
_OVERLOAD = 0.25
"""Share of the last ends, a round of them and at least a few, that makes an overload."""
_LEAST_ENDS = 8


class Sign(Enum):
    """What the end of a request says about how much its upstream can take."""

    ANSWERED = "answered"
    """It did its work, whatever the answer."""
    THROTTLED = "throttled"
    """429."""
    OVERLOADED = "overloaded"
    """503 and its like, and timeouts. A few are no overload."""
    OTHER = "other"
    """Nothing: a broken connection, a 500, or it was never sent."""


class Limiter:
    def __init__(self, *, cap: int | None) -> None:
        self._cap = _MOST if cap is None else cap
        self._concurrency = ConcurrencyLimit(cap=self._cap)
        self._rate = RateLimit()
        self._throughput = ThroughputMeter(self._concurrency.window)
        self._refusals = 0
        self._ends = self._overloads = 0
        self._cut_at = 0.0
        self._accepted = self._most_accepted = 0
        self._accepted_since = 0.0
        """Since the last refusal: how many were accepted, and the most in flight among them."""

    def set_cap(self, cap: int) -> None:
        """Change how many may be in flight at most; it may be 0."""
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
        """How many may be in flight now with the slow ones, which the limit does not count."""
        return min(self._cap, self._concurrency.limit + self._throughput.slow)

    def room(self, *, beside: int = 0) -> int:
        """How many more may be in flight, with so many others ``beside`` what is known here."""
        taken = self._throughput.in_flight + beside
        return min(self._concurrency.limit - taken, self._cap - self._throughput.slow - taken)

    def wait(self, now: float) -> float:
        """Seconds until the pace lets the next one start."""
        return 0.0 if self._rate.rate is None else self._rate.wait(now)

    def started(self, now: float, count: int) -> list[Start]:
        """To be handed back one by one as they end."""
        self._rate.started(now, count)
        return self._throughput.started(now, count)

    def ended(self, start: Start, sign: Sign, now: float) -> None:
        self._throughput.ended(start, now)
        self._ends += 1
        if sign is Sign.ANSWERED:
            self._answered(start, now)
        elif sign is Sign.THROTTLED:
            self._throttled(start, now)
        elif sign is Sign.OVERLOADED and start.at >= self._cut_at:
            self._overloaded(now)

    def _answered(self, start: Start, now: float) -> None:
        if self._rate.lately:
            self._rate.accepted()
        if start.at >= self._accepted_since:
            self._accepted += 1
            self._most_accepted = max(self._most_accepted, start.in_flight)
        measure = self._throughput.answered(start)
        if measure is not None:
            self._consider(measure, now)

    def _consider(self, measure: Measure, now: float) -> None:
        few = (_FEW_REFUSED + 2 * self._rate.background) * measure.answers
        if self._refusals > few or measure.load < _FULL * self._concurrency.limit:
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
        """A 429 may be about the number in flight: when many were accepted since the last one, but never with so many
        beside them. Where latency is even, a rate looks the same, and so does the cure."""
        return self._accepted > 4 * start.in_flight > 4 * self._most_accepted and 2 * start.in_flight >= self.limit

    def _overloaded(self, now: float) -> None:
        recent = max(_LEAST_ENDS, self._concurrency.limit)
        if self._ends > recent:
            self._ends = self._overloads = 0
        self._overloads += 1
        if self._overloads >= _OVERLOAD * recent:
            self._concurrency.overloaded()
            self._cut_at = now
            self._ends = self._overloads = 0
            self._measure_anew()

    def _measure_anew(self) -> None:
        self._refusals = 0
        self._throughput.open(self._concurrency.window)
