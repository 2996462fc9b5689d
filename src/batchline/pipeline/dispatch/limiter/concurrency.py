"""How many requests in flight an upstream is worth: as many as raise its answers a second.

Most servers queue without a word, so that the point where more in flight only wait is found by trying.

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

_FIRST = 16
_PAYS_EAGER, _PAYS, _PAYS_WELL = 0.5, 0.35, 0.7
"""What share of a stride must show in the rate: for another one, of the first ramp and of later ones, and for a
longer one."""
_ROOM = 1.05
"""Above the point where queueing seems to begin: too few lose answers, too many only wait."""
_PROBE, _STRIDE, _STRIDE_BACK = 1.125, 1.2, 0.67
_LONGEST_STRIDE, _LONGEST_EAGER_STRIDE = 1.5, 2.0
_SHORTEST_REST, _LONGEST_REST, _REST_AT_CAP = 2.0, 10.0, 20.0
"""Seconds between probes."""
_CUT, _RECOVERED = 0.6, 0.875
_FAR, _FAR_IN_NOISE = 0.3, 5.0
"""What is no longer the usual rate: as a logarithm, and in standard errors."""
_STALE_SECONDS = 30.0
_PRECISION = 0.025
"""The standard error of a rate that is aimed at."""
_QUICK_DESCENT = 3
"""Steps down in a row after which strides are taken."""


class ConcurrencyLimit:
    def __init__(self, *, cap: int) -> None:
        self._cap = cap
        self.limit = self._level = min(_FIRST, cap)
        self._former = 0
        """The level before an overload."""
        self._step: Callable[[Measure], None] = self._ramp
        self._eager = True
        """At first there is nothing to lose, and every second counts."""
        self._factor = 2.0
        self._base: Measure | None = None
        self._doubted, self._strode = False, False
        self._fell = False
        """Whether to look below when nothing is to be had above."""
        self._noise, self._evidence = Noise(), Evidence()
        self._usual: float | None = None
        self._far = 0
        self._before: Measure | None = None
        self._probing, self._upward = False, False
        self._descents = 0
        self._rest, self._probe_at = _SHORTEST_REST, 0.0

    @property
    def window(self) -> Window:
        """What to measure next."""
        if self._eager:
            return Window(round=self.limit, rounds=ceil(4 / self.limit) * (1 + self._doubted), settle=False)
        rounds = max(3, ceil(16 / self.limit))
        return Window(round=self.limit, rounds=rounds, seconds=0.5, precise=self._noise.variance / _PRECISION**2)

    def measured(self, measure: Measure) -> None:
        self._step(measure)

    def disturbed(self, now: float) -> None:
        """There was too little to do, or something else that made the measure worthless."""
        if self._probing:
            self.limit, self._before = self._level, None
            self._step, self._probing = self._hold, False
        if self._base is not None and now - self._base.at > _STALE_SECONDS:
            self._base = None

    def set_cap(self, cap: int) -> None:
        """Change the cap. What was held back by the former one climbs again."""
        was_at_cap, self._cap = max(self.limit, self._level) >= self._cap, cap
        if self._level > cap:
            self.limit = self._level = cap
        elif was_at_cap:
            self.limit = self._level = max(self.limit, min(_FIRST, cap))
            self._eager, self._factor, self._base = True, 2.0, None
            self._doubted = self._probing = self._fell = False
            self._step = self._ramp
        self.limit = min(self.limit, cap)

    def overloaded(self) -> None:
        self._former = max(self._former, self._level)
        self.limit = max(1, int(self.limit * _CUT))
        self._eager, self._doubted, self._probing, self._base = True, False, False, None
        self._step = self._recover

    def refused(self, level: int, now: float) -> None:
        """So many at once were refused, though never fewer."""
        self._settle(level - 1, now)
        self._rest_from(now, _LONGEST_REST)

    def _recover(self, measure: Measure) -> None:
        goal = max(1, int(self._former * _RECOVERED))
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
            if not WORTH < pays < _PAYS_WELL:
                self._lengthen()
            self._stride(measure.at)
        elif not self._doubted:
            self._doubted = True
        else:
            self._end_ramp(small, large)

    def _as_base(self, measure: Measure) -> Measure:
        """In the first round after a stride most answers are still to come. As long as nothing queues, latency tells
        what rate they will have."""
        if not self._eager:
            return measure
        return structs.replace(measure, rate=measure.load / measure.latency)

    @property
    def _least_pay(self) -> float:
        if self._factor < 1:
            return WORTH
        return _PAYS_EAGER if self._eager else _PAYS

    def _lengthen(self) -> None:
        longest = _LONGEST_EAGER_STRIDE if self._eager else _LONGEST_STRIDE
        self._factor = min(longest, max(_STRIDE_BACK, 1 + 2 * (self._factor - 1)))

    def _stride(self, now: float) -> None:
        target = round(self.limit * self._factor)
        target = max(self.limit + 1, target) if self._factor > 1 else min(self.limit - 1, target)
        target = min(self._cap, max(1, target))
        if target == self.limit:
            self._settle(target, now)
            # It paid all the way, so that going back is the last thing to try.
            self._rest_from(now, _REST_AT_CAP)
        else:
            self.limit = target

    def _end_ramp(self, small: Measure, large: Measure) -> None:
        eager, upward, fell, strode = self._eager, self._factor > 1, self._fell, self._strode
        knee = small.load * large.rate / small.rate * _ROOM
        self._settle(round(min(max(knee, small.load), large.load)), max(small.at, large.at))
        if eager:
            # Short measures were good enough to come near. Now look closely, and below if nothing ever paid.
            self._factor, self._step, self._fell = _STRIDE, self._ramp, not strode
        elif fell and upward:
            self._begin_ramp(large, _STRIDE_BACK)

    def _settle(self, level: int, now: float) -> None:
        self.limit = self._level = min(self._cap, max(1, level))
        self._eager = self._doubted = self._probing = self._fell = False
        self._former = 0
        self._base = self._before = None
        self._usual, self._far = None, 0
        self._evidence = Evidence()
        self._rest_from(now, _SHORTEST_REST)
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
        """Once may be a pause of the upstream. Twice, it is not what it was."""
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
            # Fewer answers may mean that fewer are served at once, or that each takes longer and more are needed.
            self._begin_ramp(measure, _STRIDE)
            self._fell = apart < 0
        return True

    def _far_from(self, measure: Measure) -> float:
        return max(_FAR, _FAR_IN_NOISE * sqrt(self._noise.variance / measure.answers))

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
            return max(self._level + 1, round(self._level * _PROBE))
        return min(self._level - 1, round(self._level / _PROBE))

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
            self._rest_from(usual.at, min(_LONGEST_REST, 2 * self._rest))
            self._turn()

    def _move(self, usual: Measure) -> None:
        self._descents = 0 if self._upward else self._descents + 1
        self._evidence = Evidence()
        if self._upward:
            self._begin_ramp(usual, _STRIDE)
        elif self._descents >= _QUICK_DESCENT:
            self._begin_ramp(usual, 1 / _STRIDE)
        else:
            self._settle(self._next_level, usual.at)

    def _turn(self) -> None:
        self._upward = not self._upward
        self._evidence = Evidence()


WORTH = 0.25
"""A level is worth ``rate / load ** WORTH``: a tenth more in flight must bring a fortieth more answers."""

_SURE, _UNLIKELY = 3.0, 1.0
"""Standard errors for a move, and against one: a needless move costs more than another look."""
_MOST_PROBES = 12
_LEAST_NOISE, _FIRST_NOISE = 0.02, 0.5
_LEARNING, _LARGEST_SURPRISE = 0.15, 9.0


class Noise:
    """Variance of the logarithm of a rate, times the answers it was measured by."""

    def __init__(self) -> None:
        self.variance = _FIRST_NOISE
        self._samples = 1

    def learn(self, one: Measure, other: Measure) -> None:
        """Two measures of the same load."""
        sample = gain(one, other) ** 2 / (1 / one.answers + 1 / other.answers)
        # A jump is the upstream's, not noise, and must not hide the next one.
        sample = min(sample, _LARGEST_SURPRISE * max(self.variance, _LEAST_NOISE))
        self._samples += 1
        self.variance += max(_LEARNING, 1 / self._samples) * (sample - self.variance)

    def between(self, one: Measure, other: Measure) -> float:
        """Variance of the gain from one to the other."""
        return max(self.variance, _LEAST_NOISE) * (1 / one.answers + 1 / other.answers)


class Evidence:
    def __init__(self) -> None:
        self._sum = self._variance = 0.0
        self._probes = 0

    def add(self, usual: Measure, probed: Measure, noise: Noise) -> None:
        self._sum += gain(usual, probed) - WORTH * spread(usual, probed)
        self._variance += noise.between(usual, probed)
        self._probes += 1

    @property
    def sure(self) -> bool:
        """The probed level is worth more."""
        return self._sum > _SURE * sqrt(self._variance)

    @property
    def unlikely(self) -> bool:
        return self._sum < -_UNLIKELY * sqrt(self._variance) or self._probes >= _MOST_PROBES
