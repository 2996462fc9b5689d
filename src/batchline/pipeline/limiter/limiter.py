"""One for each upstream and process: asked before every start, told of every end, with the time handed in."""

from enum import Enum

from batchline.pipeline.limiter.climb import Climb
from batchline.pipeline.limiter.flow import Flow, Measure, Start
from batchline.pipeline.limiter.pace import Pace

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
        self._climb = Climb(cap=self._cap)
        self._pace = Pace()
        self._flow = Flow(self._climb.window)
        self._refusals = 0
        self._ends = self._overloads = 0
        self._cut_at = 0.0
        self._accepted = self._most_accepted = 0
        self._accepted_since = 0.0
        """Since the last refusal: how many were accepted, and the most in flight among them."""

    def allow(self, most: int) -> None:
        """Change the cap; it may be none at all."""
        if most != self._cap:
            self._cap = most
            self._climb.allow(max(1, most))
            self._measure_anew()

    @property
    def limit(self) -> int:
        """How many may be in flight now."""
        return min(self._cap, self._climb.limit)

    @property
    def rate(self) -> float | None:
        """How many may start in a second now; None while that is not limited."""
        return self._pace.rate

    @property
    def most(self) -> int:
        """How many may be in flight now with the slow ones, which the limit does not count."""
        return min(self._cap, self._climb.limit + self._flow.slow)

    def room(self, *, beside: int = 0) -> int:
        """How many more may be in flight, with so many others ``beside`` what is known here."""
        taken = self._flow.in_flight + beside
        return min(self._climb.limit - taken, self._cap - self._flow.slow - taken)

    def wait(self, now: float) -> float:
        """Seconds until the pace lets the next one start."""
        return 0.0 if self._pace.rate is None else self._pace.wait(now)

    def started(self, now: float, count: int) -> list[Start]:
        """To be handed back one by one as they end."""
        self._pace.started(now, count)
        return self._flow.started(now, count)

    def ended(self, start: Start, sign: Sign, now: float) -> None:
        self._flow.ended(start, now)
        self._ends += 1
        if sign is Sign.ANSWERED:
            self._answered(start, now)
        elif sign is Sign.THROTTLED:
            self._throttled(start, now)
        elif sign is Sign.OVERLOADED and start.at >= self._cut_at:
            self._overloaded(now)

    def _answered(self, start: Start, now: float) -> None:
        if self._pace.lately:
            self._pace.accepted()
        if start.at >= self._accepted_since:
            self._accepted += 1
            self._most_accepted = max(self._most_accepted, start.in_flight)
        measure = self._flow.answered(start)
        if measure is not None:
            self._consider(measure, now)

    def _consider(self, measure: Measure, now: float) -> None:
        few = (_FEW_REFUSED + 2 * self._pace.background) * measure.answers
        if self._refusals > few or measure.load < _FULL * self._climb.limit:
            self._climb.disturbed(now)
        else:
            self._climb.measured(measure)
        self._measure_anew()

    def _throttled(self, start: Start, now: float) -> None:
        self._refusals += 1
        if self._pace.careful and self._blames_number(start):
            self._climb.refused(start.in_flight, now)
            self._measure_anew()
        else:
            self._pace.refused(started=start.at, now=now)
        self._accepted = self._most_accepted = 0
        self._accepted_since = now

    def _blames_number(self, start: Start) -> bool:
        """A 429 may be about the number in flight: when many were accepted since the last one, but never with so many
        beside them. Where latency is even, a rate looks the same, and so does the cure."""
        return self._accepted > 4 * start.in_flight > 4 * self._most_accepted and 2 * start.in_flight >= self.limit

    def _overloaded(self, now: float) -> None:
        recent = max(_LEAST_ENDS, self._climb.limit)
        if self._ends > recent:
            self._ends = self._overloads = 0
        self._overloads += 1
        if self._overloads >= _OVERLOAD * recent:
            self._climb.overloaded()
            self._cut_at = now
            self._ends = self._overloads = 0
            self._measure_anew()

    def _measure_anew(self) -> None:
        self._refusals = 0
        self._flow.open(self._climb.window)
