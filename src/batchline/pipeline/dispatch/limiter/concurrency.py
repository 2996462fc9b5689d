"""Finds how many requests an upstream should have in flight: the fewest that reach its best throughput.

::

    ramp ──(a higher limit brought little)──> hold ──(now and then)──> probe ──> recheck ──> hold
      ^                                         │ ^                                │
      └──(throughput grew, or a probe was better)┘ └──(timeouts and 503s: half)     └──(fewer were enough: hold those)

Every arrow but the last follows a complete round (`rounds.py`). A ramp goes up, but takes one step far down if requests
wait long in a deep queue. A probe is repeated if rounds at the same limit differ much (`noise.py`). The idea is that of
gradient limiters such as Netflix's concurrency-limits and of BBR's probing: compare throughput at neighbouring limits,
and prefer the lower one. As in BBR, the lowest limit that can be enough is the throughput multiplied by the lowest
latency seen.
"""

from collections import deque
from enum import Enum
from math import inf, log

from batchline.domain.engine_queue import QueueLength
from batchline.pipeline.dispatch.limiter.noise import Noise
from batchline.pipeline.dispatch.limiter.probe import UP_FACTOR, Probe
from batchline.pipeline.dispatch.limiter.rounds import Measure, Round

FIRST_LIMIT = 32
"""It is enough for two measurements on a small server, and any server can queue so few."""
_LEAST_FIRST_LIMIT = 4
_FIRST_FACTOR = 4.0
"""The factor of the first step of the ramp. The less a step raised the throughput, the shorter is the next one."""
_INSTANT_SECONDS, _INSTANT_FACTOR = 0.01, 2.0
"""If answers take less than this, a step is at most twice the limit: four times as many would be more than a process
can read, and each connection that is opened costs as much as several lines."""
_RAMP_PART, HOLD_PART = 0.6, 0.9
"""The part of a round that must have ended. A ramp does not wait for as many while latencies are about equal, since it
compares rounds with the same part missing."""
MIN_ROUND = 16
_QUICK_SECONDS = 1.0
"""If a round takes less than this, the next rounds are longer, so that measurements are better."""
_LEAST_SECONDS, _MOST_SHORT_ROUNDS = 0.05, 16
"""A round should take at least this, and has at most so many requests for each slot for that. In less time the turns of
this process, each of which handles up to 64 answers, show more than the upstream."""
_LEAST_ELASTICITY = 0.2
"""A ramp ends when throughput grew by less than the limit to this power: ten times the limit must bring 1.6 times the
throughput."""
_LONGER = 2.0
"""If answers take so many times as long as the quickest of a ramp, the ramp goes on in small steps."""
_NEAR_BEST = 0.97
"""A limit with this part of the best throughput is as good as the best."""
_CLIMB_FACTOR = 1.5
"""The first step of a ramp that starts from a limit known to work."""
_QUEUES, _FEW = 1.5, 16
"""An upstream seems to queue if answers take so many times as long as the quickest of the ramp. No limit lower than a
few is looked for."""
_LEAST = 2
"""An upstream that has only one request in flight is idle until the next one comes."""
_WORTH_A_PROBE = 0.9
"""A lower limit is probed only if it is at most this part of the limit."""
_MIN_GAIN, TOLERATED_LOSS = 0.04, 0.02
"""The change of throughput, as a logarithm, that a higher limit must bring and a lower limit may cost."""
_SURE = 1.5
"""A higher limit must be better by this number of standard errors. One in fifteen seems better by chance."""
_MOVED = 0.3
"""The change of throughput, as a logarithm and in two rounds in a row, that shows that the upstream has changed."""
_MOST_ROUNDS = 6
_RAMP_ERROR, _HOLD_ERROR = 0.1, 0.04
"""The relative errors that rounds are made long enough for. A round has at most ``_MOST_ROUNDS`` requests for each
slot."""
_EVEN, _QUEUED = 0.25, 0.6
"""Latencies that vary less than this are about equal; if they correlate more than this with the number in flight, some
requests queued behind others."""
_DEEPLY_QUEUED = 0.9
"""If latencies correlate more than this with the number in flight, most of each is the time in a queue, and the
quickest answer shows how long one takes without it."""
_LONG_WAIT_SECONDS = 1.0
"""If requests wait longer than this in the queue of the upstream, it is worth to look for a limit below a few: the
requests of another project, and of synchronous calls, wait there too."""
_SPARE, _DEEP = 2.0, 6.0
"""A queue is deep if the limit is six times what the throughput and the quickest answer show to be enough. Twice that
is a limit with some to spare, and with enough load for an upstream that adds servers under load."""
_STEP_DOWN_PART = 0.9
"""The step down was right if it left this part of the throughput. It is measured by few answers."""
_QUEUE_LENGTH_SECONDS = 15.0
"""The time for which a queue length that an engine reports is used."""
_OWN_PART, _OWN_FACTOR = 0.5, 1.25
"""An engine that has less than this part of our requests in flight is not the one that answers them, or only one of
several; one that has more than this factor has those of others too. Some of ours may be on their way at the moment of
a reading, and some of the last ones may still be counted."""
_READINGS = 4
_SHORT_QUEUE, _ENOUGH_QUEUE, _LONG_QUEUE = 0.25, 1.0, 1.25
"""The length of a queue as a part of the requests that are processed. A short one may run empty between two steps of
the engine. One that is enough lasts even if all requests end in the same step, as equally long ones do."""


class Phase(Enum):
    """The search for a limit is always in one of these phases."""

    RAMP = "ramp"
    HOLD = "hold"
    PROBE = "probe"
    RECHECK = "recheck"


PROBING = frozenset({Phase.PROBE, Phase.RECHECK})


class _Queue(Enum):
    """The length of the queue inside the engine."""

    SHORT = "short"
    ENOUGH = "enough"
    """It may be longer than is needed: these requests may all have come since the last step, or be those of others."""
    LONG = "long"
    """All requests in it are ours, so a lower limit would shorten it."""


class ConcurrencyLimit:
    """The limit on the requests in flight, and the search for it."""

    def __init__(self, *, cap: int) -> None:
        self._cap = cap
        self.limit = min(FIRST_LIMIT, cap)
        self._wanted = 0
        """The limit that there was before a lower cap replaced it; 0 if none was replaced."""
        self._phase = Phase.RAMP
        self._was_held = False
        """Whether a ramp has ended."""
        self._factor = _FIRST_FACTOR
        """The next step of the ramp."""
        self._points: list[Measure] = []
        """The measurements of this ramp."""
        self._early_round: Round | None = None
        """The round of the last of these, if that was taken before the slowest requests had ended."""
        self._quickest = inf
        """The lowest latency of a request in a round that queued deeply; infinity if there was none."""
        self._round: Round | None = None
        self._usual_latency: dict[str, float] = {}
        """The mean latency of each model in its first round. All latencies are divided by it."""
        self._probe = Probe()
        self._noise = Noise()
        self._last: Measure | None = None
        """The measure of the round before, if it was held at this limit too."""
        self._expected: float | None = None
        """The throughput at this limit, as a logarithm."""
        self._rounds_off = 0
        """The number of rounds in a row that had another throughput than expected."""
        self._least_latency = inf
        """The lowest mean latency of any round, or the lowest latency of a request in one that queued deeply."""
        self._variation = 0.0
        """The variation of the latencies in the last round."""
        self._is_quick = False
        self._mean_seconds = inf
        """The mean latency of the last round in seconds; infinity before the first."""
        self._again = False
        """Whether a limit of the ramp is measured a second time, more precisely."""
        self._queue: _Queue | None = None
        self._queue_until = 0.0
        """The time until which the queue length that the engine reported is used."""
        self._running: deque[float] = deque(maxlen=_READINGS)
        """The number of requests that the engine processed, in the last readings."""

    def begin(self, *, beside: int) -> None:
        """Choose the first limit, which is lower beside so many models of which nothing is known either.

        They may be names of one engine: a hundred of them would otherwise have thousands of requests in flight.
        """
        self.limit = min(self._cap, max(_LEAST_FIRST_LIMIT, FIRST_LIMIT // (1 + beside)))

    def set_cap(self, cap: int) -> None:
        """Set the most that the limit may be. A limit that the former cap had lowered is restored."""
        before, self._cap = self._cap, cap
        if self.limit > cap:
            self._wanted = max(self._wanted, self.limit)
            self._hold(cap)
        elif self.limit >= before:
            self._points, self._factor = [], _FIRST_FACTOR
            self._set_limit(max(self._wanted, FIRST_LIMIT), Phase.RAMP)
            self._wanted = 0

    @property
    def is_measured(self) -> bool:
        """Whether a round was completed."""
        return self._least_latency < inf

    @property
    def is_in_first_ramp(self) -> bool:
        return not self._was_held

    @property
    def least_latencies(self) -> dict[str, float]:
        """The lowest mean latency of each model in seconds."""
        return {model: latency * self._least_latency for model, latency in self._usual_latency.items()}

    def on_start(self, model: str, in_flight: int, now: float) -> Round | None:
        """Return the round that a request belongs to, or None. ``in_flight`` includes the request itself."""
        if self._round is None:
            self._round = self._new_round(in_flight, now)
        return self._round if self._round.add(model, in_flight, now) else None

    def on_answer(
        self, round_: Round | None, model: str, in_flight: int, of_model: int, latency: float, now: float
    ) -> None:
        """Count an answer to a request of a round, or of none.

        A model that takes minutes for its answers must not keep the limit where it is for all models.
        """
        current = self._round
        if round_ is not None and round_ is self._early_round:
            round_.end(model, in_flight, of_model, latency)
        if current is None:
            return
        if round_ is not current:
            if current.overtake(now - latency):
                self._give_up_round(now)
        elif current.end(model, in_flight, of_model, latency):
            self._round = None
            current.scale(self._usual_latency)
            self._consider(current, now)

    def _give_up_round(self, now: float) -> None:
        """End a round that says nothing. A ramp goes on, and a probe has changed nothing."""
        self._round = None
        if self._phase is Phase.RAMP:
            self._points = []
            self._set_limit(int(self.limit * _FIRST_FACTOR), Phase.RAMP)
        elif self._phase is not Phase.HOLD:
            self._end_search()
            self._probe.on_nothing_changed(now)

    def on_no_answer(self, round_: Round | None, model: str) -> None:
        """Take a request that had no answer out of its round, if it belongs to one."""
        if round_ is not None and round_ is self._round:
            round_.remove(model)

    def set_limit(self, limit: int, now: float) -> None:
        """Hold a limit that was not found by throughput."""
        self._hold(limit)
        self._probe.rest(now)

    def on_queue_length(self, length: QueueLength, *, in_flight: int, now: float) -> None:
        """Believe an engine that tells how many requests wait: more of them do not help if many wait already.

        A short queue is a reason to probe a higher limit, and whether that is better is left to throughput. Requests
        that came during a step of the engine wait until the next one, so an engine whose answers need few steps has a
        queue at any limit; but no more wait for the next step than are in this one. A long queue may be that of other
        clients or of another model, and then it says nothing.
        """
        if in_flight < self.limit or _is_of_others(length, in_flight):
            return
        # Between two steps an engine may process fewer for a moment, so the largest of the last readings counts.
        self._running.append(max(length.running or 0.0, in_flight - length.waiting))
        part = length.waiting / max(1.0, *self._running)
        self._queue_until = now + _QUEUE_LENGTH_SECONDS
        if part <= _SHORT_QUEUE:
            self._queue = _Queue.SHORT
            if self._phase is Phase.HOLD:
                self._probe.schedule_up()
            elif self._phase is Phase.RAMP and not length.waiting:
                self._skip_slow_round(now)
        elif part <= _LONG_QUEUE or not _is_ours(length, in_flight):
            self._queue = _Queue.ENOUGH
        else:
            self._queue = _Queue.LONG
            if self._phase is Phase.RAMP:
                self._hold(self.limit)
                self._probe.begin_descent(now, far=True)
            elif self._phase is Phase.PROBE and self._probe.upwards:
                self._end_search()
                self._probe.on_nothing_changed(now)

    def _skip_slow_round(self, now: float) -> None:
        """Take the next step of the ramp before its round is complete, because the engine has no queue.

        If answers take a minute, a ramp by complete rounds would take several minutes.
        """
        if self._round is not None and self.limit < self._cap and now - self._round.since > _QUICK_SECONDS:
            self._set_limit(int(self.limit * _FIRST_FACTOR), Phase.RAMP)

    def _new_round(self, in_flight: int, now: float) -> Round:
        """Return a round at the present limit. Its first request starts with so many ``in_flight``."""
        limit = self.limit
        if self._phase is Phase.RAMP and not self._again:
            return Round(limit, size=max(MIN_ROUND, limit), full=False, part=_RAMP_PART, since=now)
        rounds = min(_MOST_SHORT_ROUNDS, _LEAST_SECONDS / self._mean_seconds)
        size = max(MIN_ROUND, limit * max(rounds, 2 if self._is_quick else 1))
        precise = (self._variation / (_RAMP_ERROR if self._again else _HOLD_ERROR)) ** 2
        return Round(
            limit, size=int(max(size, min(_MOST_ROUNDS * limit, precise))), full=True, part=HOLD_PART, since=now
        )

    def _consider(self, round_: Round, now: float) -> None:
        measure = round_.measure
        self._variation, self._is_quick = measure.variation, now - round_.since < _QUICK_SECONDS
        self._least_latency = min(self._least_latency, measure.latency)
        self._mean_seconds = round_.mean_seconds
        if self._phase is Phase.RAMP:
            self._consider_first(round_, measure, now)
        elif self._phase is Phase.PROBE:
            self._probe.during = measure
            self._set_limit(self._probe.home, Phase.RECHECK)
        elif self._phase is Phase.RECHECK:
            self._end_probe(measure, now)
        else:
            self._consider_hold(measure, now)

    def _consider_first(self, round_: Round, measure: Measure, now: float) -> None:
        """Consider the first round at a limit of the ramp, whose requests started together, or the second one.

        If the latencies are about equal, or do not depend on the order of the starts, each request ran beside all the
        others. If requests that started later took longer, some queued, and those that started last show the
        throughput. If rounds take little time, a second one is measured, whose requests start with all slots taken: if
        they take very little, always, and else if the latencies are uneven.
        """
        if not round_.is_used:
            return
        if self._again:
            self._consider_ramp(measure, now, queued=False)
            return
        uneven = measure.variation >= _EVEN
        correlation = round_.correlation if uneven else 0.0
        queued = correlation > _QUEUED
        if correlation > _DEEPLY_QUEUED:
            self._quickest = min(self._quickest, round_.quickest)
            self._least_latency = min(self._least_latency, self._quickest)
        if queued:
            measure = round_.last_measure
        elif uneven and round_.extend(HOLD_PART):
            # The first to end are the quickest. By them alone, all would seem quicker than they are.
            self._round = round_
            return
        else:
            measure.load = measure.limit
            if uneven:
                self._measure_early_round_again()
        if self._step_down(measure):
            return
        is_worse = queued and any(measure.rate < _NEAR_BEST * point.rate for point in self._points)
        is_short = now - round_.since < _LEAST_SECONDS
        if (is_short or (self._is_quick and uneven)) and not is_worse:
            self._again = True
        else:
            self._consider_ramp(measure, now, queued=queued)
            self._early_round = None if uneven else round_

    def _measure_early_round_again(self) -> None:
        """Measure the last round of the ramp again, with the answers that came since.

        It seemed even because only its quick requests had ended. Beside it, a round that has waited for the slow ones
        would seem to be much slower.
        """
        if self._early_round is None or not self._points:
            return
        self._early_round.scale(self._usual_latency)
        measure = self._early_round.measure
        measure.load = measure.limit
        self._points[-1] = measure
        self._least_latency = min(point.latency for point in self._points)

    def _step_down(self, measure: Measure) -> bool:
        """Go on with the ramp at a much lower limit if requests wait long, and return whether that is so.

        A server with one slot would otherwise need many minutes for the rounds of a search step by step.
        """
        enough = measure.rate * self._quickest
        if self.limit < _DEEP * enough or not self._waits_long(measure):
            return False
        self._points.append(measure)
        self._set_limit(int(_SPARE * enough) + 1, Phase.RAMP)
        return True

    def _end_step_down(self, measure: Measure, before: Measure, now: float) -> None:
        if measure.rate > _STEP_DOWN_PART * before.rate:
            self.set_limit(measure.limit, now)
        else:
            # The quickest answer was no usual one.
            self._quickest, self._least_latency = inf, measure.latency
            self._end_ramp(now)

    def _consider_ramp(self, measure: Measure, now: float, *, queued: bool) -> None:
        self._points.append(measure)
        if queued:
            self._factor = _CLIMB_FACTOR
        if len(self._points) > 1:
            if measure.limit < self._points[-2].limit:
                self._end_step_down(measure, self._points[-2], now)
                return
            elasticity = _elasticity(*self._points[-2:])
            if elasticity < _LEAST_ELASTICITY:
                self._end_ramp(now)
                return
            self._factor = 1 + (_FIRST_FACTOR - 1) * max(0.3, min(1.0, elasticity)) ** 2
            if queued or measure.latency > _LONGER * min(point.latency for point in self._points):
                self._factor = min(self._factor, UP_FACTOR)
        if self._mean_seconds < _INSTANT_SECONDS:
            self._factor = min(self._factor, _INSTANT_FACTOR)
        if self.limit >= self._cap:
            self._end_ramp(now)
        else:
            self._set_limit(max(self.limit + 1, int(self.limit * self._factor)), Phase.RAMP)

    def _end_ramp(self, now: float) -> None:
        """Hold the lowest limit that was as good as the best, and look from there for a lower one.

        If the engine reported enough of a queue, the limit is at least as high as keeps the whole engine busy. A round
        of an engine that answers in waves may show a lower limit than that.
        """
        points = sorted(self._points, key=lambda point: point.limit)
        best = max(point.rate for point in points)
        at = next(index for index, point in enumerate(points) if point.rate >= _NEAR_BEST * best)
        limit = points[at].limit
        if self._is_known_busy(now):
            limit = max(limit, min(self._enough, points[-1].limit))
        self._hold(limit)
        queues = points[at].latency > _QUEUES * min(point.latency for point in points)
        self._probe.begin_descent(now, far=queues or not at)

    def _consider_hold(self, measure: Measure, now: float) -> None:
        if self._last is not None:
            self._noise.add(self._last, measure)
        self._last = measure
        rate = log(measure.rate)
        if self._expected is None:
            self._expected = rate
        change = rate - self._expected
        if abs(change) > max(_MOVED, 3 * self._noise.error(measure)):
            self._rounds_off += 1
            if self._rounds_off > 1:
                self._on_moved(measure, now, faster=change > 0)
                return
        else:
            self._rounds_off = 0
            self._expected += 0.3 * change
        if self._probe.is_due(now) and (self.limit < self._cap or self._lowest(measure, now) < self.limit):
            self._begin_probe(measure, now)

    def _on_moved(self, measure: Measure, now: float, *, faster: bool) -> None:
        if faster and not self._has_queue(_Queue.LONG, now):
            self._climb(measure)
            return
        self._hold(self.limit)
        if not faster:
            self._probe.begin_descent(now, far=True)
            self._begin_probe(measure, now)

    def _climb(self, measure: Measure) -> None:
        self._points, self._factor = [measure], _CLIMB_FACTOR
        self._set_limit(max(self.limit + 1, int(self.limit * self._factor)), Phase.RAMP)

    def _begin_probe(self, measure: Measure, now: float) -> None:
        lowest, is_long = self._lowest(measure, now), self._has_queue(_Queue.LONG, now)
        if is_long and lowest == measure.limit:
            self._probe.rest(now)
            return
        if is_long or self._has_queue(_Queue.SHORT, now):
            self._probe.upwards = not is_long
        self._probe.begin(measure, cap=self._cap, lowest=lowest, far=is_long)
        self._set_limit(self._probe.limit, Phase.PROBE)

    def _lowest(self, measure: Measure, now: float) -> int:
        """Return the lowest limit to probe, which is the present one if no lower one is worth a probe.

        By Little's law a limit below the throughput multiplied by the lowest latency must be slower. If the engine
        reported its queue, its numbers are used instead. No limit below a few is probed: it would save nothing.
        """
        if self._is_known_busy(now):
            return min(measure.limit, self._enough)
        lowest = max(_LEAST, int(measure.limit * self._least_latency / measure.latency))
        few = min(_FEW, int(_SPARE * lowest) + 1) if self._waits_long(measure) else _FEW
        return lowest if max(lowest, few) <= _WORTH_A_PROBE * measure.limit else measure.limit

    def _waits_long(self, measure: Measure) -> bool:
        """Return whether requests of the last round took much longer than at the lowest latency."""
        return self._mean_seconds * (1 - self._least_latency / measure.latency) > _LONG_WAIT_SECONDS

    def _end_probe(self, measure: Measure, now: float) -> None:
        probe = self._probe
        change, error = probe.compare(measure, self._noise)
        least = self._least_change(measure, error, now)
        if now >= self._queue_until and probe.is_unclear(change, error, least=least):
            # An engine that reports its queue is believed at once.
            self._set_limit(probe.limit, Phase.PROBE)
            return
        self._end_search()
        if probe.upwards:
            if change > least:
                probe.rest(now)
                self._climb(measure)
            elif change > 0.0 and self._has_queue(_Queue.SHORT, now):
                self._hold(probe.limit)
                probe.rest(now)
            else:
                probe.on_nothing_changed(now)
        elif change > least:
            self._hold(probe.limit)
            probe.on_fewer_enough(now)
        else:
            probe.on_nothing_changed(now)

    def _least_change(self, measure: Measure, error: float, now: float) -> float:
        """Return the change of throughput that a probe must surpass.

        A higher limit must be clearly better. A lower one must not be worse; if it leaves much to spare, it must not
        seem to be, and if the engine told that many requests wait, it must not be clearly worse.
        """
        if self._probe.upwards:
            return max(_MIN_GAIN, _SURE * error)
        if self._has_queue(_Queue.LONG, now):
            return -max(TOLERATED_LOSS, _SURE * error)
        has_to_spare = self._probe.limit >= _SPARE * measure.limit * self._least_latency / measure.latency
        return -TOLERATED_LOSS if has_to_spare else error - TOLERATED_LOSS

    @property
    def _enough(self) -> int:
        """The limit at which the engine would always have enough to do, and no more."""
        return int((1 + _ENOUGH_QUEUE) * max(self._running)) + 1

    def _is_known_busy(self, now: float) -> bool:
        """Return whether the engine reported that requests wait in it."""
        return self._has_queue(_Queue.ENOUGH, now) or self._has_queue(_Queue.LONG, now)

    def _has_queue(self, queue: _Queue, now: float) -> bool:
        return self._queue is queue and now < self._queue_until

    def _end_search(self) -> None:
        """Return to the limit before a probe."""
        self._hold(self._probe.home)

    def _hold(self, limit: int) -> None:
        self._points, self._expected, self._rounds_off, self._was_held = [], None, 0, True
        self._set_limit(limit, Phase.HOLD)

    def _set_limit(self, limit: int, phase: Phase) -> None:
        self.limit, self._phase = max(1, min(self._cap, limit)), phase
        self._round, self._last, self._again = None, None, False


def _is_of_others(length: QueueLength, in_flight: int) -> bool:
    """Return whether a reading does not contain the requests in flight. It may contain those of other clients too."""
    return length.running is not None and length.running + length.waiting < _OWN_PART * in_flight


def _is_ours(length: QueueLength, in_flight: int) -> bool:
    """Return whether a reading contains hardly any requests but those in flight."""
    return length.running is not None and length.running + length.waiting <= _OWN_FACTOR * in_flight


def _elasticity(before: Measure, after: Measure) -> float:
    """Return the growth of throughput as a power of that of the load: 1 if it grew as much, 0 if it did not grow."""
    return log(after.rate / before.rate) / max(0.05, log(after.load / before.load)) if after.load > before.load else 1.0
