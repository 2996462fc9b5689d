"""Finds how many requests an upstream should have in flight: the fewest that reach its best throughput.

::

    ramp ──(a higher limit brought little)──> hold ──(now and then)──> probe ──> recheck ──> hold
      ^                                         │ ^                                │
      └──(throughput grew, or a probe was better)┘ └──(timeouts and 503s: half)     └──(fewer were enough: hold those)

Every arrow but the last follows a complete round (`rounds.py`). The ramp (`ramp.py`) finds a first limit, and probes
(`probe.py`) look for a better one near it. They are repeated if rounds at the same limit differ much (`noise.py`). What
an engine reports of its queue (`reported_queue.py`) is believed before any of this. The idea is that of gradient
limiters such as Netflix's concurrency-limits and of BBR's probing: compare throughput at neighbouring limits, and
prefer the lower one. As in BBR, the lowest limit that can be enough is the throughput multiplied by the lowest latency
seen.
"""

from enum import Enum
from math import inf

from batchline.domain.engine_queue import QueueLength
from batchline.pipeline.dispatch.limiter.expected import Expected
from batchline.pipeline.dispatch.limiter.latencies import Latencies
from batchline.pipeline.dispatch.limiter.noise import Noise
from batchline.pipeline.dispatch.limiter.probe import Probe
from batchline.pipeline.dispatch.limiter.ramp import SPARE, Descent, Found, Ramp, Unfinished
from batchline.pipeline.dispatch.limiter.reported_queue import ReportedQueue
from batchline.pipeline.dispatch.limiter.rounds import HOLD_PART, LEAST_SECONDS, QUICK_SECONDS, Measure, Round

FIRST_LIMIT = 32
"""It is enough for two measurements on a small server, and any server can queue so few."""
_LEAST_FIRST_LIMIT = 4
MIN_ROUND = 16
_RAMP_PART = 0.6
"""The part of a round of a ramp that must have ended. It is smaller than that of other rounds, since a ramp compares
rounds with the same part missing."""
_FEW = 16
"""No limit lower than a few is looked for."""
_LEAST = 2
"""An upstream that has only one request in flight is idle until the next one comes."""
_WORTH_A_PROBE = 0.9
"""A lower limit is probed only if it is at most this part of the limit."""
_MIN_GAIN, TOLERATED_LOSS = 0.04, 0.02
"""The change of throughput, as a logarithm, that a higher limit must bring and a lower limit may cost."""
_SURE = 1.5
"""A higher limit must be better by this number of standard errors. One in fifteen seems better by chance."""
_MOST_ROUNDS, _MOST_SHORT_ROUNDS = 6, 16
_RAMP_ERROR, _HOLD_ERROR = 0.1, 0.04
"""The relative errors that rounds are made long enough for. A round has at most ``_MOST_ROUNDS`` requests for each
slot, and ``_MOST_SHORT_ROUNDS`` to take long enough."""


class Phase(Enum):
    """The search for a limit is always in one of these phases."""

    RAMP = "ramp"
    HOLD = "hold"
    PROBE = "probe"
    RECHECK = "recheck"


PROBING = frozenset({Phase.PROBE, Phase.RECHECK})


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
        self._round: Round | None = None
        self._latencies = Latencies()
        self._variation = 0.0
        """The variation of the latencies in the last round."""
        self._is_quick = False
        """Whether the last round took little time."""
        self._ramp = Ramp(self._latencies)
        self._noise = Noise()
        self._expected = Expected(self._noise)
        self._probe = Probe()
        self._queue = ReportedQueue()

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
            self._ramp.begin()
            self._set_limit(max(self._wanted, FIRST_LIMIT), Phase.RAMP)
            self._wanted = 0

    @property
    def is_measured(self) -> bool:
        """Whether a round was completed."""
        return self._latencies.least < inf

    @property
    def is_in_first_ramp(self) -> bool:
        return not self._was_held

    @property
    def least_latencies(self) -> dict[str, float]:
        """The lowest mean latency of each model in seconds."""
        return self._latencies.least_of_models

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
        if round_ is not None:
            self._ramp.on_late_answer(round_, model, in_flight, of_model, latency)
        if current is None:
            return
        if round_ is not current:
            if current.overtake(now - latency):
                self._give_up_round(now)
        elif current.end(model, in_flight, of_model, latency):
            self._round = None
            current.scale(self._latencies.usual)
            self._consider(current, now)

    def _give_up_round(self, now: float) -> None:
        """End a round that says nothing. A ramp goes on, and a probe has changed nothing."""
        self._round = None
        if self._phase is Phase.RAMP:
            self._set_limit(self._ramp.give_up_round(self.limit), Phase.RAMP)
        elif self._phase is not Phase.HOLD:
            self._end_search()
            self._probe.on_nothing_changed(now)

    def on_no_answer(self, round_: Round | None, model: str) -> None:
        """Take a request that had no answer out of its round, if it belongs to one."""
        if round_ is not None and round_ is self._round:
            round_.remove(model)

    def set_limit(self, limit: int, now: float) -> None:
        """Hold a limit that was not found by throughput. If nothing is measured yet, the ramp begins there again."""
        if self.is_measured:
            self._hold(limit)
            self._probe.rest(now)
        else:
            self._ramp.begin(carefully=True)
            self._set_limit(limit, Phase.RAMP)

    def on_queue_length(self, length: QueueLength, *, in_flight: int, now: float) -> None:
        """Believe an engine that reports how many requests wait: more of them do not help if many wait already.

        A short queue is a reason to probe a higher limit, and whether that is better is left to throughput.
        """
        if in_flight < self.limit or not self._queue.read(length, in_flight=in_flight, now=now):
            return
        if self._queue.is_short(now):
            if self._phase is Phase.HOLD:
                self._probe.schedule_up()
            elif self._phase is Phase.RAMP and not length.waiting:
                self._skip_slow_round(now)
        elif self._queue.is_long(now):
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
        if self._round is not None and self.limit < self._cap and now - self._round.since > QUICK_SECONDS:
            self._set_limit(self._ramp.skip(self.limit), Phase.RAMP)

    def _new_round(self, in_flight: int, now: float) -> Round:
        """Return a round at the present limit. Its first request starts with so many ``in_flight``."""
        limit, is_ramp = self.limit, self._phase is Phase.RAMP
        if is_ramp and not self._ramp.is_again:
            return Round(limit, size=max(MIN_ROUND, limit), full=False, part=_RAMP_PART, since=now)
        rounds = min(_MOST_SHORT_ROUNDS, LEAST_SECONDS / self._latencies.mean_seconds)
        size = max(MIN_ROUND, limit * max(rounds, 2 if self._is_quick else 1))
        precise = (self._variation / (_RAMP_ERROR if is_ramp else _HOLD_ERROR)) ** 2
        return Round(
            limit, size=int(max(size, min(_MOST_ROUNDS * limit, precise))), full=True, part=HOLD_PART, since=now
        )

    def _consider(self, round_: Round, now: float) -> None:
        measure = round_.measure
        self._variation, self._is_quick = measure.variation, now - round_.since < QUICK_SECONDS
        self._latencies.add(round_, measure)
        if self._phase is Phase.RAMP:
            self._consider_ramp(round_, measure, now)
        elif self._phase is Phase.PROBE:
            self._probe.during = measure
            self._set_limit(self._probe.home, Phase.RECHECK)
        elif self._phase is Phase.RECHECK:
            self._end_probe(measure, now)
        else:
            self._consider_hold(measure, now)

    def _consider_ramp(self, round_: Round, measure: Measure, now: float) -> None:
        least = self._queue.lowest_limit if self._queue.is_enough(now) else 1
        match self._ramp.consider(round_, measure, now, cap=self._cap, least=least):
            case int(limit):
                self._set_limit(limit, Phase.RAMP)
            case Found(limit, Descent.NONE):
                self.set_limit(limit, now)
            case Found(limit, descent):
                self._hold(limit)
                self._probe.begin_descent(now, far=descent is Descent.FAR)
            case Unfinished.WAIT:
                self._round = round_
            case Unfinished.REPEAT:
                pass

    def _consider_hold(self, measure: Measure, now: float) -> None:
        moved = self._expected.moved_by(measure)
        if moved:
            self._on_moved(measure, now, faster=moved > 0)
            return
        if self._probe.is_due(now) and (self.limit < self._cap or self._lowest(measure, now) < self.limit):
            self._begin_probe(measure, now)

    def _on_moved(self, measure: Measure, now: float, *, faster: bool) -> None:
        if faster and not self._queue.is_long(now):
            self._climb(measure)
            return
        self._hold(self.limit)
        if not faster:
            self._probe.begin_descent(now, far=True)
            self._begin_probe(measure, now)

    def _climb(self, measure: Measure) -> None:
        self._set_limit(self._ramp.climb(measure), Phase.RAMP)

    def _begin_probe(self, measure: Measure, now: float) -> None:
        lowest, is_long = self._lowest(measure, now), self._queue.is_long(now)
        if is_long and lowest == measure.limit:
            self._probe.rest(now)
            return
        if is_long or self._queue.is_short(now):
            self._probe.upwards = not is_long
        self._probe.begin(measure, cap=self._cap, lowest=lowest, far=is_long)
        self._set_limit(self._probe.limit, Phase.PROBE)

    def _lowest(self, measure: Measure, now: float) -> int:
        """Return the lowest limit to probe, which is the present one if no lower one is worth a probe.

        By Little's law a limit below the throughput multiplied by the lowest latency must be slower. If the engine
        reported its queue, its numbers are used instead. No limit below a few is probed: it would save nothing.
        """
        if self._queue.is_enough(now):
            return min(measure.limit, self._queue.lowest_limit)
        lowest = max(_LEAST, int(self._latencies.least_limit(measure)))
        few = min(_FEW, int(SPARE * lowest) + 1) if self._latencies.wait_long(measure) else _FEW
        return lowest if max(lowest, few) <= _WORTH_A_PROBE * measure.limit else measure.limit

    def _end_probe(self, measure: Measure, now: float) -> None:
        probe = self._probe
        change, error = probe.compare(measure, self._noise)
        least = self._least_change(measure, error, now)
        if not self._queue.is_known(now) and probe.is_unclear(change, error, least=least):
            # An engine that reports its queue is believed at once.
            self._set_limit(probe.limit, Phase.PROBE)
            return
        self._end_search()
        if probe.upwards:
            if change > least:
                probe.rest(now)
                self._climb(measure)
            elif change > 0.0 and self._queue.is_short(now):
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
        if self._queue.is_long(now):
            return -max(TOLERATED_LOSS, _SURE * error)
        has_to_spare = self._probe.limit >= SPARE * self._latencies.least_limit(measure)
        return -TOLERATED_LOSS if has_to_spare else error - TOLERATED_LOSS

    def _end_search(self) -> None:
        """Return to the limit before a probe."""
        self._hold(self._probe.home)

    def _hold(self, limit: int) -> None:
        self._was_held = True
        self._set_limit(limit, Phase.HOLD)

    def _set_limit(self, limit: int, phase: Phase) -> None:
        self.limit, self._phase = max(1, min(self._cap, limit)), phase
        self._round = None
        self._expected.forget()
