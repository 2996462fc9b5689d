"""Finds how many requests an upstream should have in flight: the fewest that reach its best throughput.

::

    ramp ──(a higher limit brought little)──> hold ──(now and then)──> probe ──> recheck ──> hold
      ^                                         │ ^                                │
      └──(throughput grew, or a probe was better)┘ └──(timeouts and 503s: half)     └──(fewer were enough: hold those)

Every arrow but the last follows a complete round (`rounds.py`). The idea is that of gradient limiters such as Netflix's
concurrency-limits and of BBR's probing: compare throughput at neighbouring limits, and prefer the lower one.
"""

from collections import deque
from enum import Enum
from math import log, sqrt

from batchline.domain.engine_queue import QueueLength
from batchline.pipeline.dispatch.limiter.rounds import Measure, Round

FIRST_LIMIT = 32
"""Enough for two measurements on a small server, and few enough to be queued by any."""
_FIRST_FACTOR = 4.0
"""The first step of the ramp. The next ones are shorter, the less the last one brought."""
_RAMP_PART, _HOLD_PART = 0.6, 0.9
"""The part of a round that must have ended. A ramp is in a hurry, and compares rounds with the same part missing."""
_MIN_ROUND = 16
_QUICK_SECONDS = 1.0
"""If answers are quicker than this, time is spent on better measurements."""
_LEAST_ELASTICITY = 0.2
"""A ramp ends when throughput grew by less than the limit to this power: ten times as many, 1.6 times as fast."""
_LONGER = 2.0
"""When answers take so many times as long as at the start of a ramp, it goes on in small steps."""
_NEAR_BEST = 0.97
"""A limit with this part of the best throughput is as good as the best."""
_CLIMB_FACTOR = 1.5
"""The first step of a ramp that starts from a limit known to work."""
_UP_FACTOR, _DOWN_FACTOR, _FAR_DOWN_FACTOR = 1.33, 0.8, 0.6
"""How far a probe goes. The first ones down go far if the upstream seems to queue."""
_QUEUES, _FEW = 1.5, 16
"""An upstream seems to queue if answers take so many times as long as at the lowest limit. If no more than a few are in
flight, no lower limit is looked for."""
_MIN_GAIN, _TOLERATED_LOSS = 0.04, 0.02
"""The change of throughput, as a logarithm, that a higher limit must bring and a lower limit may cost."""
_SHORTEST_REST_SECONDS, _LONGEST_REST_SECONDS = 2.0, 30.0
"""The time between probes. It doubles while they change nothing."""
_MOVED = 0.3
"""The change of throughput, as a logarithm and in two rounds in a row, that shows another upstream than before."""
_MOST_ROUNDS = 6
_RAMP_ERROR, _HOLD_ERROR = 0.1, 0.04
"""The relative errors that rounds are made long enough for, up to so many requests for each slot."""
_EVEN, _QUEUED = 0.25, 0.6
"""Latencies that vary less than this are about equal; if they correlate more than this with the number in flight, some
requests queued behind others."""
_QUEUE_LENGTH_SECONDS = 15.0
"""How long the queue length that an engine tells is believed."""
_READINGS = 4
_SHORT_QUEUE, _ENOUGH_QUEUE, _LONG_QUEUE = 0.25, 0.5, 0.75
"""The length of a queue as a part of what is processed. A short one may run empty between two steps of the engine."""


class _Phase(Enum):
    RAMP = "ramp"
    HOLD = "hold"
    PROBE = "probe"
    RECHECK = "recheck"


class _Queue(Enum):
    """The length of the queue inside the engine."""

    SHORT = "short"
    ENOUGH = "enough"
    """It says nothing, since it may also consist of what came since the last step."""
    LONG = "long"


class ConcurrencyLimit:
    """The limit on the requests in flight, and the search for it."""

    def __init__(self, *, cap: int) -> None:
        self._cap = cap
        self.limit = min(FIRST_LIMIT, cap)
        self._wanted = 0
        """The limit that a lower cap replaced."""
        self._phase = _Phase.RAMP
        self._factor = _FIRST_FACTOR
        """The next step of the ramp."""
        self._points: list[Measure] = []
        """The measurements of this ramp."""
        self._round: Round | None = None
        self._usual_latency: dict[str, float] = {}
        """The mean latency of each model in its first round. All later ones are measured by it."""
        self._probe = Probe()
        self._expected: float | None = None
        """The throughput at this limit, as a logarithm."""
        self._rounds_off = 0
        """How many rounds in a row had another throughput than expected."""
        self._variation = 0.0
        """The variation of the latencies in the last round."""
        self._is_quick = False
        self._again = False
        """Whether a limit of the ramp is measured a second time, more precisely."""
        self._queue: _Queue | None = None
        self._queue_until = 0.0
        """What the engine said of its queue counts until this time."""
        self._running: deque[float] = deque(maxlen=_READINGS)
        """How many requests the engine processed, in the last readings."""

    def set_cap(self, cap: int) -> None:
        """Set the most that the limit may be. A limit that the former cap had lowered is restored."""
        before, self._cap = self._cap, cap
        if self.limit > cap:
            self._wanted = max(self._wanted, self.limit)
            self._hold(cap)
        elif self.limit >= before:
            self._points, self._factor = [], _FIRST_FACTOR
            self._set_limit(max(self._wanted, FIRST_LIMIT), _Phase.RAMP)
            self._wanted = 0

    def on_start(self, in_flight: int, now: float) -> Round | None:
        """Return the round that a request belongs to, if it does, with so many in flight including itself."""
        if self._round is None:
            self._round = self._new_round(now)
        return self._round if self._round.add(in_flight) else None

    def on_answer(self, round_: Round, model: str, in_flight: int, latency: float, now: float) -> None:
        """Count an answer to a request of a round."""
        if round_ is self._round and round_.end(model, in_flight, latency):
            self._round = None
            round_.scale(self._usual_latency)
            self._consider(round_, now)

    def on_no_answer(self, round_: Round) -> None:
        """Take a request that had no answer out of its round."""
        if round_ is self._round:
            round_.remove()

    def set_limit(self, limit: int, now: float) -> None:
        """Hold a limit that something else than throughput suggests."""
        self._hold(limit)
        self._probe.rest(now)

    def on_queue_length(self, length: QueueLength, *, in_flight: int, now: float) -> None:
        """Believe an engine that tells its queue about where to look: a short one asks for more, a long one for less.

        Throughput decides whether the limit moves. Requests that came during a step of the engine wait until the next
        one, so an engine whose answers need few steps has a queue at any limit.
        """
        if in_flight < self.limit:
            return
        # Between two steps an engine may process fewer for a moment, so the most of the last readings counts.
        self._running.append(max(length.running or 0.0, in_flight - length.waiting))
        part = length.waiting / max(1.0, *self._running)
        self._queue_until = now + _QUEUE_LENGTH_SECONDS
        if part > _LONG_QUEUE:
            self._queue = _Queue.LONG
        elif part > _SHORT_QUEUE:
            self._queue = _Queue.ENOUGH
        else:
            self._queue = _Queue.SHORT
            if self._phase is _Phase.HOLD:
                self._probe.schedule_up()

    def _new_round(self, now: float) -> Round:
        limit = self.limit
        if self._phase is _Phase.RAMP and not self._again:
            return Round(limit, size=max(_MIN_ROUND // 2, limit), full=False, part=_RAMP_PART, since=now)
        size = max(_MIN_ROUND, 2 * limit) if self._is_quick else max(_MIN_ROUND // 2, limit)
        precise = (self._variation / (_RAMP_ERROR if self._again else _HOLD_ERROR)) ** 2
        return Round(
            limit, size=int(max(size, min(_MOST_ROUNDS * limit, precise))), full=True, part=_HOLD_PART, since=now
        )

    def _consider(self, round_: Round, now: float) -> None:
        measure = round_.measure
        self._variation, self._is_quick = measure.variation, now - round_.since < _QUICK_SECONDS
        if self._phase is _Phase.RAMP:
            self._consider_first(round_, measure, now)
        elif self._phase is _Phase.PROBE:
            self._probe.during = measure
            self._set_limit(self._probe.home, _Phase.RECHECK)
        elif self._phase is _Phase.RECHECK:
            self._end_probe(measure, now)
        else:
            self._consider_hold(measure, now)

    def _consider_first(self, round_: Round, measure: Measure, now: float) -> None:
        """Consider the first round at a limit of the ramp, whose requests started together, or the second.

        If all took about equally long, or as long whether they started early or late, each had all the others beside
        it. If those that started later took longer, some queued, and those that started last show the throughput. If
        it takes little time, a second round is measured, whose requests start with all slots taken.
        """
        if not round_.is_used:
            return
        if self._again:
            self._consider_ramp(measure, now, queued=False)
            return
        uneven = measure.variation >= _EVEN
        queued = uneven and round_.correlation > _QUEUED
        if queued:
            measure = round_.last_measure
        elif uneven and round_.extend(_HOLD_PART):
            # The first to end are the quickest. All would seem quicker than they are.
            self._round = round_
            return
        else:
            measure.load = measure.limit
        is_worse = queued and any(measure.rate < _NEAR_BEST * point.rate for point in self._points)
        if self._is_quick and uneven and not is_worse:
            self._again = True
        else:
            self._consider_ramp(measure, now, queued=queued)

    def _consider_ramp(self, measure: Measure, now: float, *, queued: bool) -> None:
        self._points.append(measure)
        if queued:
            self._factor = _CLIMB_FACTOR
        if len(self._points) > 1:
            elasticity = _elasticity(*self._points[-2:])
            if elasticity < _LEAST_ELASTICITY:
                self._end_ramp(now)
                return
            self._factor = 1 + (_FIRST_FACTOR - 1) * max(0.3, min(1.0, elasticity)) ** 2
            if queued or measure.latency > _LONGER * min(point.latency for point in self._points):
                self._factor = min(self._factor, _UP_FACTOR)
        if self.limit >= self._cap:
            self._end_ramp(now)
        else:
            self._set_limit(max(self.limit + 1, int(self.limit * self._factor)), _Phase.RAMP)

    def _end_ramp(self, now: float) -> None:
        """Hold the lowest limit that was as good as the best, and look from there for a lower one.

        If the engine told that its queue is long, the limit is as high as it takes to keep all of the engine busy: one
        round of an engine that answers in waves shows less than that.
        """
        points = sorted(self._points, key=lambda point: point.limit)
        best = max(point.rate for point in points)
        at = next(index for index, point in enumerate(points) if point.rate >= _NEAR_BEST * best)
        limit = points[at].limit
        if self._has_queue(_Queue.LONG, now):
            limit = max(limit, min(self._enough, points[-1].limit))
        self._hold(limit)
        queues = points[at].latency > _QUEUES * min(point.latency for point in points)
        self._probe.begin_descent(now, far=queues or not at)

    def _consider_hold(self, measure: Measure, now: float) -> None:
        rate = log(measure.rate)
        if self._expected is None:
            self._expected = rate
        change = rate - self._expected
        if abs(change) > max(_MOVED, 3 * measure.error):
            self._rounds_off += 1
            if self._rounds_off > 1:
                self._on_moved(measure, now, faster=change > 0)
                return
        else:
            self._rounds_off = 0
            self._expected += 0.3 * change
        # A few in flight are no burden, and a lower limit would cost more than it shows.
        if self._probe.is_due(now) and not self._cap <= self.limit <= _FEW:
            self._begin_probe(measure, now)

    def _on_moved(self, measure: Measure, now: float, *, faster: bool) -> None:
        if faster:
            self._climb(measure)
        else:
            self._hold(self.limit)
            self._probe.begin_descent(now, far=True)
            self._begin_probe(measure, now)

    def _climb(self, measure: Measure) -> None:
        self._points, self._factor = [measure], _CLIMB_FACTOR
        self._set_limit(max(self.limit + 1, int(self.limit * self._factor)), _Phase.RAMP)

    def _begin_probe(self, measure: Measure, now: float) -> None:
        down_to = None
        if self._has_queue(_Queue.SHORT, now):
            self._probe.upwards = True
        elif self._has_queue(_Queue.LONG, now):
            self._probe.upwards, down_to = False, self._enough
        self._probe.begin(measure, cap=self._cap, down_to=down_to)
        self._set_limit(self._probe.limit, _Phase.PROBE)

    def _end_probe(self, measure: Measure, now: float) -> None:
        probe = self._probe
        change, error = probe.change(measure)
        self._hold(probe.home)
        if probe.upwards:
            if change > max(_MIN_GAIN, error):
                probe.rest(now)
                self._climb(measure)
            elif change > 0.0 and self._has_queue(_Queue.SHORT, now):
                self._hold(probe.limit)
                probe.rest(now)
            else:
                probe.on_nothing_changed(now)
        elif change > (0.0 if self._has_queue(_Queue.LONG, now) else error) - _TOLERATED_LOSS:
            self._hold(probe.limit)
            probe.on_fewer_enough(now)
        else:
            probe.on_nothing_changed(now)

    @property
    def _enough(self) -> int:
        """The limit at which the queue that the engine told of is neither short nor long."""
        return int((1 + _ENOUGH_QUEUE) * max(self._running)) + 1

    def _has_queue(self, queue: _Queue, now: float) -> bool:
        return self._queue is queue and now < self._queue_until

    def _hold(self, limit: int) -> None:
        self._points, self._expected, self._rounds_off = [], None, 0
        self._set_limit(limit, _Phase.HOLD)

    def _set_limit(self, limit: int, phase: _Phase) -> None:
        self.limit, self._phase = max(1, min(self._cap, limit)), phase
        self._round, self._again = None, False


class Probe:
    """A look at another limit: a round before it, one at it, and one after it, when to look, and in which direction."""

    def __init__(self) -> None:
        self.upwards = True
        self.home = self.limit = 1
        """The limit to return to, and the one to look at."""
        self.during: Measure | None = None
        self._before: Measure | None = None
        self._rest_seconds = _SHORTEST_REST_SECONDS
        self._due = 0.0
        self._down_factor = _FAR_DOWN_FACTOR

    def is_due(self, now: float) -> bool:
        return now >= self._due

    def schedule_up(self) -> None:
        self.upwards, self._due = True, 0.0

    def begin_descent(self, now: float, *, far: bool) -> None:
        """Look downwards first."""
        self.upwards, self._down_factor, self._due = False, _FAR_DOWN_FACTOR if far else _DOWN_FACTOR, now
        self._rest_seconds = _SHORTEST_REST_SECONDS

    def begin(self, before: Measure, *, cap: int, down_to: int | None = None) -> None:
        """Begin to look at another limit, at ``down_to`` if it is given and lies below."""
        self._before, self.home = before, before.limit
        if self.home <= _FEW:
            self.upwards = True
        elif self.home >= cap:
            self.upwards = False
        if self.upwards:
            self.limit = max(self.home + 1, int(self.home * _UP_FACTOR))
        else:
            self.limit = min(self.home - 1, down_to or int(self.home * self._down_factor))

    def change(self, after: Measure) -> tuple[float, float]:
        """Return by how much the throughput differed from that before and after, as a logarithm, and its error."""
        if self._before is None or self.during is None:
            raise RuntimeError("a probe ended that had not begun")
        usual = sqrt(self._before.rate * after.rate)
        error = sqrt(self.during.error**2 + (self._before.error**2 + after.error**2) / 4)
        return log(self.during.rate / usual), error

    def on_nothing_changed(self, now: float) -> None:
        """Rest, longer after each look in both directions, and look in the other direction then."""
        if self.upwards:
            self._rest_seconds = min(_LONGEST_REST_SECONDS, 2 * self._rest_seconds)
        self.upwards, self._down_factor = not self.upwards, _DOWN_FACTOR
        self.rest(now)

    def on_fewer_enough(self, now: float) -> None:
        """Look further down, soon."""
        self._rest_seconds, self._due = _SHORTEST_REST_SECONDS, now

    def rest(self, now: float) -> None:
        self._due = now + self._rest_seconds


def _elasticity(before: Measure, after: Measure) -> float:
    """Return the power of the load that the throughput grew by: 1 for as much as the load, 0 for not at all."""
    return log(after.rate / before.rate) / max(0.05, log(after.load / before.load)) if after.load > before.load else 1.0
