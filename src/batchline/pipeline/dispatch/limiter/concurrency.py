"""Finds how many requests to keep in flight to an upstream: as many as raise its answers per second.

Most servers queue requests silently, so the point from which more in flight only wait is found by trying.

::

    ramp ──(a stride brought too little)──> hold, where the last stride stopped paying
    hold ──(now and then)──> probe, an eighth more or less ──> compare with before and after ──> hold
    compare ──(worth more beyond doubt)──> ramp upward in growing strides; downward one step
    hold ──(twice far from the usual)──> ramp
    any ──(overloaded)──> recover from far below to near the former level ──> hold
"""

from collections.abc import Callable
from functools import partial
from math import ceil, log, sqrt

from msgspec import structs

from batchline.pipeline.dispatch.limiter.throughput import Measure, Window, gain, mean, spread

_FIRST_LIMIT = 16
_MIN_PAY_FIRST_RAMP, _MIN_PAY, _MIN_PAY_TO_LENGTHEN = 0.5, 0.35, 0.7
"""The part of a stride that must show in the rate: for another stride of the first ramp, for another stride of a later
one, and for a longer stride."""
_ABOVE_KNEE = 1.05
"""How far above the point where queueing seems to begin the limit is held: too few in flight lose answers, too many
only wait."""
_PROBE_FACTOR, _STRIDE_FACTOR, _STRIDE_DOWN_FACTOR = 1.125, 1.2, 0.67
_MAX_STRIDE_FACTOR, _MAX_FIRST_STRIDE_FACTOR = 1.5, 2.0
_MIN_REST_SECONDS, _MAX_REST_SECONDS, _REST_AT_CAP_SECONDS = 2.0, 10.0, 20.0
"""The time between two probes."""
_OVERLOAD_FACTOR, _RECOVERY_FACTOR = 0.6, 0.875
"""What an overload leaves of the limit, and the part of the former level at which recovery ends."""
_MIN_JUMP, _MIN_JUMP_STANDARD_ERRORS = 0.3, 5.0
"""How far from the usual rate a measurement must be to count as a jump: as a logarithm, and in standard errors."""
_STALE_SECONDS = 30.0
"""The age at which the base of a ramp is no longer compared with."""
_TARGET_STANDARD_ERROR = 0.025
"""The standard error of a rate for which enough answers are awaited."""
_DESCENTS_BEFORE_RAMP = 3
"""Steps down in a row after which strides are taken."""


class ConcurrencyLimit:
    """The limit on requests in flight, and the search for it."""

    def __init__(self, *, cap: int) -> None:
        self._cap = cap
        self.limit = self._level = min(_FIRST_LIMIT, cap)
        self._former = 0
        """The level before an overload, which recovery aims at."""
        self._step: Callable[[Measure], None] = self._ramp
        self._eager = True
        """Whether measurements are short and strides long, because at first there is nothing to lose."""
        self._factor = 2.0
        self._base: Measure | None = None
        self._doubted, self._strode = False, False
        self._fell = False
        """Whether to try fewer in flight if more do not pay, since the rate has fallen."""
        self._noise, self._evidence = Noise(), Evidence()
        self._usual: float | None = None
        self._far = 0
        self._before: Measure | None = None
        self._probing, self._upward = False, False
        self._descents = 0
        self._rest, self._probe_at = _MIN_REST_SECONDS, 0.0

    @property
    def window(self) -> Window:
        """The window of the next measurement."""
        if self._eager:
            return Window(round=self.limit, rounds=ceil(4 / self.limit) * (1 + self._doubted), settle=False)
        rounds = max(3, ceil(16 / self.limit))
        return Window(
            round=self.limit, rounds=rounds, seconds=0.5, precise=self._noise.variance / _TARGET_STANDARD_ERROR**2
        )

    def measured(self, measure: Measure) -> None:
        """Take the next step, by a complete measurement."""
        self._step(measure)

    def disturbed(self, now: float) -> None:
        """Ignore a measurement that says nothing, because there was too little to do or too much was refused."""
        if self._probing:
            self.limit, self._before = self._level, None
            self._step, self._probing = self._hold, False
        if self._base is not None and now - self._base.at > _STALE_SECONDS:
            self._base = None

    def set_cap(self, cap: int) -> None:
        """Set the cap. A limit that was held back by the former cap is searched for again."""
        was_at_cap, self._cap = max(self.limit, self._level) >= self._cap, cap
        if self._level > cap:
            self.limit = self._level = cap
        elif was_at_cap:
            self.limit = self._level = max(self.limit, min(_FIRST_LIMIT, cap))
            self._eager, self._factor, self._base = True, 2.0, None
            self._doubted = self._probing = self._fell = False
            self._step = self._ramp
        self.limit = min(self.limit, cap)

    def overloaded(self) -> None:
        """Reduce the limit at once, and recover step by step to near the level before."""
        self._former = max(self._former, self._level)
        self.limit = max(1, int(self.limit * _OVERLOAD_FACTOR))
        self._eager, self._doubted, self._probing, self._base = True, False, False, None
        self._step = self._recover

    def refused(self, level: int, now: float) -> None:
        """Hold below a level: so many in flight were refused, and fewer never were."""
        self._settle(level - 1, now)
        self._rest_from(now, _MAX_REST_SECONDS)

    def _recover(self, measure: Measure) -> None:
        goal = max(1, int(self._former * _RECOVERY_FACTOR))
        self.limit = min(goal, 2 * self.limit)
        if self.limit == goal:
            self._settle(goal, measure.at)

    def _ramp(self, measure: Measure) -> None:
        base = self._base
        if base is None:
            self._base = self._as_base(measure)
            self._stride(measure.at)
            return
        upward = measure.load > base.load
        small, large = (base, measure) if upward else (measure, base)
        pays = gain(small, large) / max(spread(small, large), 0.01)
        if (pays > self._least_pay) == upward:
            self._doubted = False
            self._base = self._as_base(measure)
            self._level, self._strode, self._fell = self.limit, True, False
            if not WORTH < pays < _MIN_PAY_TO_LENGTHEN:
                self._lengthen()
            self._stride(measure.at)
        elif not self._doubted:
            self._doubted = True
        else:
            self._end_ramp(small, large)

    def _as_base(self, measure: Measure) -> Measure:
        """Return a measurement to compare the next one with.

        In the first round after a stride most answers are still to come. As long as nothing queues, the latency shows
        what rate they will have.
        """
        if not self._eager:
            return measure
        return structs.replace(measure, rate=measure.load / measure.latency)

    @property
    def _least_pay(self) -> float:
        if self._factor < 1:
            return WORTH
        return _MIN_PAY_FIRST_RAMP if self._eager else _MIN_PAY

    def _lengthen(self) -> None:
        longest = _MAX_FIRST_STRIDE_FACTOR if self._eager else _MAX_STRIDE_FACTOR
        self._factor = min(longest, max(_STRIDE_DOWN_FACTOR, 1 + 2 * (self._factor - 1)))

    def _stride(self, now: float) -> None:
        target = round(self.limit * self._factor)
        target = max(self.limit + 1, target) if self._factor > 1 else min(self.limit - 1, target)
        target = min(self._cap, max(1, target))
        if target == self.limit:
            self._settle(target, now)
            # More paid all the way up to the cap, so the next try of fewer can wait for long.
            self._rest_from(now, _REST_AT_CAP_SECONDS)
        else:
            self.limit = target

    def _end_ramp(self, small: Measure, large: Measure) -> None:
        eager, upward, fell, strode = self._eager, self._factor > 1, self._fell, self._strode
        knee = small.load * large.rate / small.rate * _ABOVE_KNEE
        self._settle(round(min(max(knee, small.load), large.load)), max(small.at, large.at))
        if eager:
            # Short measurements were good enough to come near. Now measure precisely, and try fewer if no stride paid.
            self._factor, self._step, self._fell = _STRIDE_FACTOR, self._ramp, not strode
        elif fell and upward:
            self._begin_ramp(large, _STRIDE_DOWN_FACTOR)

    def _settle(self, level: int, now: float) -> None:
        self.limit = self._level = min(self._cap, max(1, level))
        self._eager = self._doubted = self._probing = self._fell = False
        self._former = 0
        self._base = self._before = None
        self._usual, self._far = None, 0
        self._evidence = Evidence()
        self._rest_from(now, _MIN_REST_SECONDS)
        self._step = self._hold

    def _rest_from(self, now: float, seconds: float) -> None:
        self._rest = seconds
        self._probe_at = now + seconds

    def _hold(self, measure: Measure) -> None:
        if self._is_far(measure):
            return
        if self._before is not None:
            self._noise.learn(self._before, measure)
        self._before = measure
        if measure.at >= self._probe_at:
            self._begin_probe(measure)

    def _is_far(self, measure: Measure) -> bool:
        """Return whether a rate is far from the usual one, and search again after the second in a row.

        One may be a pause of the upstream. After two its capacity has changed.
        """
        rate = log(measure.rate)
        if self._usual is None:
            self._usual = rate
            return False
        apart = rate - self._usual
        if abs(apart) < self._far_from(measure):
            self._usual += 0.2 * apart
            self._far = 0
            return False
        self._far += 1
        if self._far > 1:
            # Fewer answers mean that fewer are served at once, or that each takes longer and more in flight are needed.
            self._begin_ramp(measure, _STRIDE_FACTOR)
            self._fell = apart < 0
        return True

    def _far_from(self, measure: Measure) -> float:
        return max(_MIN_JUMP, _MIN_JUMP_STANDARD_ERRORS * sqrt(self._noise.variance / measure.answers))

    def _begin_ramp(self, base: Measure, factor: float) -> None:
        self._base, self._doubted, self._factor, self._strode = base, False, factor, True
        self._usual, self._far, self._before = None, 0, None
        self._step = self._ramp
        self._stride(base.at)

    def _begin_probe(self, before: Measure) -> None:
        if not 1 <= self._next_level <= self._cap:
            self._turn()
        if 1 <= self._next_level <= self._cap:
            self.limit = self._next_level
            self._step, self._probing = partial(self._probe, before), True

    @property
    def _next_level(self) -> int:
        if self._upward:
            return max(self._level + 1, round(self._level * _PROBE_FACTOR))
        return min(self._level - 1, round(self._level / _PROBE_FACTOR))

    def _probe(self, before: Measure, probed: Measure) -> None:
        self.limit = self._level
        self._step = partial(self._compare, before, probed)

    def _compare(self, before: Measure, probed: Measure, after: Measure) -> None:
        self._step, self._probing = self._hold, False
        if abs(gain(before, after)) > self._far_from(after):
            self._before = None
            self._hold(after)
            return
        self._noise.learn(before, after)
        self._before = after
        usual = mean(before, after)
        self._evidence.add(usual, probed, self._noise)
        self._decide(usual)

    def _decide(self, usual: Measure) -> None:
        if self._evidence.sure:
            self._move(usual)
        elif self._evidence.unlikely:
            self._descents = 0
            self._rest_from(usual.at, min(_MAX_REST_SECONDS, 2 * self._rest))
            self._turn()

    def _move(self, usual: Measure) -> None:
        self._descents = 0 if self._upward else self._descents + 1
        self._evidence = Evidence()
        if self._upward:
            self._begin_ramp(usual, _STRIDE_FACTOR)
        elif self._descents >= _DESCENTS_BEFORE_RAMP:
            self._begin_ramp(usual, 1 / _STRIDE_FACTOR)
        else:
            self._settle(self._next_level, usual.at)

    def _turn(self) -> None:
        self._upward = not self._upward
        self._evidence = Evidence()


WORTH = 0.25
"""A level is worth ``rate / load ** WORTH``: 10 % more in flight must bring 2.5 % more answers."""

_SURE_STANDARD_ERRORS, _UNLIKELY_STANDARD_ERRORS = 3.0, 1.0
"""The evidence needed for a move, and against one: a needless move costs more than another probe."""
_MAX_PROBES = 12
_MIN_VARIANCE, _FIRST_VARIANCE = 0.02, 0.5
_MIN_SAMPLE_WEIGHT, _MAX_SAMPLE_FACTOR = 0.15, 9.0
"""The least weight of a new sample in the variance, and how many times the variance it may be at most."""


class Noise:
    """The variance of the logarithm of a rate, times the number of answers it was measured by."""

    def __init__(self) -> None:
        self.variance = _FIRST_VARIANCE
        self._samples = 1

    def learn(self, one: Measure, other: Measure) -> None:
        """Update the variance by two measurements of the same load."""
        sample = gain(one, other) ** 2 / (1 / one.answers + 1 / other.answers)
        # A jump is a change of the upstream and not noise. It must not hide the next one.
        sample = min(sample, _MAX_SAMPLE_FACTOR * max(self.variance, _MIN_VARIANCE))
        self._samples += 1
        self.variance += max(_MIN_SAMPLE_WEIGHT, 1 / self._samples) * (sample - self.variance)

    def between(self, one: Measure, other: Measure) -> float:
        """Return the variance of the gain from one measurement to the other."""
        return max(self.variance, _MIN_VARIANCE) * (1 / one.answers + 1 / other.answers)


class Evidence:
    """What the probes of one direction have shown so far."""

    def __init__(self) -> None:
        self._sum = self._variance = 0.0
        self._probes = 0

    def add(self, usual: Measure, probed: Measure, noise: Noise) -> None:
        self._sum += gain(usual, probed) - WORTH * spread(usual, probed)
        self._variance += noise.between(usual, probed)
        self._probes += 1

    @property
    def sure(self) -> bool:
        """Whether the probed level is worth more beyond doubt."""
        return self._sum > _SURE_STANDARD_ERRORS * sqrt(self._variance)

    @property
    def unlikely(self) -> bool:
        """Whether the probed level is probably not worth more, or was probed often enough."""
        return self._sum < -_UNLIKELY_STANDARD_ERRORS * sqrt(self._variance) or self._probes >= _MAX_PROBES
