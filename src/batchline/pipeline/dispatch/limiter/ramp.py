"""Finds a first limit: it rises in steps until the next step brings little.

::

    throughput
        │           x──────────x   brought little: hold the lowest limit that is nearly as good
        │        x
        │  x                       the less a step brought, the shorter is the next one
        └──┴─────┴──┴──────────┴── limit

If requests wait long in a deep queue, the ramp goes one step far down instead.
"""

from dataclasses import dataclass
from enum import Enum
from math import inf, log

from batchline.pipeline.dispatch.limiter.latencies import Latencies
from batchline.pipeline.dispatch.limiter.probe import UP_FACTOR
from batchline.pipeline.dispatch.limiter.rounds import HOLD_PART, LEAST_SECONDS, QUICK_SECONDS, Measure, Round

_FIRST_FACTOR = 4.0
"""The factor of the first step. The less a step raised the throughput, the shorter is the next one."""
_CLIMB_FACTOR = 1.5
"""The first step from a limit that is known to work."""
_INSTANT_SECONDS, _INSTANT_FACTOR = 0.01, 2.0
"""If answers take less than this, a step is at most twice the limit: four times as many would be more than a process
can read, and each connection that is opened costs as much as several lines."""
_LONGER = 2.0
"""If answers take so many times as long as the quickest of a ramp, the ramp goes on in small steps."""
_LEAST_ELASTICITY = 0.2
"""A ramp ends when throughput grew by less than the limit to this power: ten times the limit must bring 1.6 times the
throughput."""
_NEAR_BEST = 0.97
"""A limit with this part of the best throughput is as good as the best."""
_QUEUES = 1.5
"""An upstream seems to queue if answers take so many times as long as the quickest of the ramp."""
_EVEN, _QUEUED = 0.25, 0.6
"""Latencies that vary less than this are about equal; if they correlate more than this with the number in flight, some
requests queued behind others."""
_DEEPLY_QUEUED = 0.9
"""If latencies correlate more than this with the number in flight, most of each is the time in a queue, and the
quickest answer shows how long one takes without it."""
SPARE, _DEEP = 2.0, 6.0
"""A queue is deep if the limit is six times what the throughput and the quickest answer show to be enough. Twice that
is a limit with some to spare, and with enough load for an upstream that adds servers under load."""
_STEP_DOWN_PART = 0.9
"""The step down was right if it left this part of the throughput. It is measured by few answers."""


class Descent(Enum):
    """How to go on from a limit that a ramp has found."""

    NONE = "none"
    NEAR = "near"
    """Lower limits are probed, step by step."""
    FAR = "far"
    """The same, in larger steps."""


@dataclass(frozen=True, slots=True)
class Found:
    """The limit that a ramp ended with."""

    limit: int
    descent: Descent


class Unfinished(Enum):
    """The limit cannot be judged yet."""

    WAIT = "wait"
    """More requests of the same round must end."""
    REPEAT = "repeat"
    """Another round is needed at the same limit."""


class Ramp:
    """The search for the first limit, or for a higher one when the upstream has become faster."""

    def __init__(self, latencies: Latencies) -> None:
        self._latencies = latencies
        self._points: list[Measure] = []
        self._factor = _FIRST_FACTOR
        """The next step."""
        self._early_round: Round | None = None
        """The round of the last point, if that was taken before the slowest requests had ended."""
        self._quickest = inf
        """The lowest latency of a request in a round that queued deeply; infinity if there was none."""
        self.is_again = False
        """Whether a limit is measured a second time, more precisely."""

    def begin(self, *, carefully: bool = False) -> None:
        """Begin at a limit of which nothing is known, or ``carefully`` with a small step, if a higher one failed."""
        factor = _CLIMB_FACTOR if carefully else _FIRST_FACTOR
        self._points, self._factor, self._early_round, self.is_again = [], factor, None, False

    def climb(self, measure: Measure) -> int:
        """Begin at a limit that is known to work, and return the next one."""
        self._points, self._factor, self._early_round = [measure], _CLIMB_FACTOR, None
        return self._next(measure.limit)

    def skip(self, limit: int) -> int:
        """Return the limit that follows on one whose round is not waited for."""
        self.is_again = False
        return int(limit * _FIRST_FACTOR)

    def give_up_round(self, limit: int) -> int:
        """Return the limit that follows on one whose round says nothing. Others are not compared with it."""
        self._points = []
        return self.skip(limit)

    def on_late_answer(self, round_: Round, model: str, in_flight: int, of_model: int, latency: float) -> None:
        """Count an answer to a request of a round that was complete without it."""
        if round_ is self._early_round:
            round_.end(model, in_flight, of_model, latency)

    def consider(
        self, round_: Round, measure: Measure, now: float, *, cap: int, least: int
    ) -> int | Found | Unfinished:
        """Return the next limit, or the one that was found, or that none can be told yet.

        The limit found is not below ``least`` if the ramp has reached that.
        """
        if not round_.is_used:
            return Unfinished.REPEAT
        if self.is_again:
            self._early_round = None
            return self._add(measure, cap=cap, least=least, queued=False)
        return self._consider_first(round_, measure, now, cap=cap, least=least)

    def _consider_first(
        self, round_: Round, measure: Measure, now: float, *, cap: int, least: int
    ) -> int | Found | Unfinished:
        """Consider the first round at a limit, whose requests started together.

        If the latencies are about equal, or do not depend on the order of the starts, each request ran beside all the
        others. If requests that started later took longer, some queued, and those that started last show the
        throughput. If rounds take little time, a second one is measured, whose requests start with all slots taken: if
        they take very little, always, and else if the latencies are uneven.
        """
        uneven = measure.variation >= _EVEN
        correlation = round_.correlation if uneven else 0.0
        queued = correlation > _QUEUED
        if correlation > _DEEPLY_QUEUED:
            self._quickest = min(self._quickest, round_.quickest)
            self._latencies.least = min(self._latencies.least, self._quickest)
        if queued:
            measure = round_.last_measure
        elif uneven and round_.extend(HOLD_PART):
            # The first to end are the quickest. By them alone, all would seem quicker than they are.
            return Unfinished.WAIT
        else:
            measure.load = measure.limit
            if uneven:
                self._measure_early_round_again()
        if (lower := self._step_down(measure)) is not None:
            return lower
        is_worse = queued and any(measure.rate < _NEAR_BEST * point.rate for point in self._points)
        seconds = now - round_.since
        # At the first limit slots may be free, so it is not measured more precisely.
        is_vague = uneven and seconds < QUICK_SECONDS and bool(self._points)
        if (seconds < LEAST_SECONDS or is_vague) and not is_worse:
            self.is_again = True
            return Unfinished.REPEAT
        self._early_round = None if uneven else round_
        return self._add(measure, cap=cap, least=least, queued=queued)

    def _measure_early_round_again(self) -> None:
        """Measure the last round again, with the answers that came since.

        It seemed even because only its quick requests had ended. Beside it, a round that has waited for the slow ones
        would seem to be much slower.
        """
        if self._early_round is None or not self._points:
            return
        self._early_round.scale(self._latencies.usual)
        measure = self._early_round.measure
        measure.load = measure.limit
        self._points[-1] = measure
        self._latencies.least = min(point.latency for point in self._points)

    def _step_down(self, measure: Measure) -> int | None:
        """Return a much lower limit to go on with if requests wait long, and None if they do not.

        A server with one slot would otherwise need many minutes for the rounds of a search step by step.
        """
        enough = measure.rate * self._quickest
        if measure.limit < _DEEP * enough or not self._latencies.wait_long(measure):
            return None
        self._points.append(measure)
        return int(SPARE * enough) + 1

    def _end_step_down(self, measure: Measure, before: Measure, *, least: int) -> Found:
        if measure.rate > _STEP_DOWN_PART * before.rate:
            return Found(measure.limit, Descent.NONE)
        # The quickest answer was no usual one.
        self._quickest, self._latencies.least = inf, measure.latency
        return self._end(least=least)

    def _add(self, measure: Measure, *, cap: int, least: int, queued: bool) -> int | Found:
        self._points.append(measure)
        if queued:
            self._factor = _CLIMB_FACTOR
        if len(self._points) > 1:
            if measure.limit < self._points[-2].limit:
                return self._end_step_down(measure, self._points[-2], least=least)
            elasticity = _elasticity(*self._points[-2:])
            if elasticity < _LEAST_ELASTICITY:
                return self._end(least=least)
            self._factor = 1 + (_FIRST_FACTOR - 1) * max(0.3, min(1.0, elasticity)) ** 2
            if queued or measure.latency > _LONGER * min(point.latency for point in self._points):
                self._factor = min(self._factor, UP_FACTOR)
        if self._latencies.mean_seconds < _INSTANT_SECONDS:
            self._factor = min(self._factor, _INSTANT_FACTOR)
        return self._end(least=least) if measure.limit >= cap else self._next(measure.limit)

    def _next(self, limit: int) -> int:
        self.is_again = False
        return max(limit + 1, int(limit * self._factor))

    def _end(self, *, least: int) -> Found:
        """Return the lowest limit that was as good as the best. A lower one is looked for from there.

        Of limits whose measurements differ by chance, the higher one is likely to be good enough.

        A round of an engine that answers in waves may show a lower limit than keeps the whole engine busy. So an engine
        that reported enough of a queue tells what the limit is at ``least``.
        """
        points = sorted(self._points, key=lambda point: point.limit)
        rates = [point.rate * (1 - point.error) for point in points]
        at = next(index for index, rate in enumerate(rates) if rate >= _NEAR_BEST * max(rates))
        queues = points[at].latency > _QUEUES * min(point.latency for point in points)
        limit = max(points[at].limit, min(least, points[-1].limit))
        return Found(limit, Descent.FAR if queues or not at else Descent.NEAR)


def _elasticity(before: Measure, after: Measure) -> float:
    """Return the growth of throughput as a power of that of the load: 1 if it grew as much, 0 if it did not grow."""
    return log(after.rate / before.rate) / max(0.05, log(after.load / before.load)) if after.load > before.load else 1.0
