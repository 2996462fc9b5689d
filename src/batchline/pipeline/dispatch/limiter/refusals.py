"""Learns from refusals (429) how many requests of a model its upstream accepts.

Some upstreams refuse what exceeds a number in flight, others what exceeds a rate. By Little's law both are one: a rate
is a number in flight divided by the latency. So one number is looked for, the *limit*. It may be a fraction
(`slots.py`)::

                 many are refused               now and then
    unlimited ────────────────────> hold <══════════════════════> probe: a little more, then much more
        ^                         ^ │ ^                             │
        │                         │ │ └─ many are refused:          │
        │                         │ │    as many as were accepted   │
        │                         │ └──> test: after three such cuts│
        │                         └────────┘                        │
        └───────────────────────────────────────────────────────────┘
                    more than are in flight would be accepted

Holding the part that was accepted is right at once, be it about a number or about a rate. If as large a part is refused
again and again, however low the limit is, a *test* compares two limits: if the part is the same, the refusals have
nothing to do with the limit and are tolerated. A small part is always tolerated: it shows that the upstream is full,
and the refused lines are tried again.
"""

from enum import Enum
from math import ceil, inf

from batchline.domain.retry import MAX_RETRY_AFTER_SECONDS
from batchline.pipeline.dispatch.limiter.load import Start
from batchline.pipeline.dispatch.limiter.sample import Sample
from batchline.pipeline.dispatch.limiter.slots import GOLDEN_RATIO, Slots

_FEW, _MANY, _ALL = 0.12, 0.25, 0.99
"""Parts of the requests. If few are refused, nothing is done. If many of the last ones are, there is a limit. If all
are, no lower limit can be derived from them."""
_TOLERANCE = 1.3
"""A part that is refused at any limit may grow by this factor before it is about the limit."""
_NONE = 0.02
"""While no larger part than this is refused, the upstream may not be full."""
_RECENT_WEIGHT, _USUAL_WEIGHT, _USUAL_SAMPLE_WEIGHT = 1 / 16, 1 / 64, 0.2
"""The weights of one more request in the part that was refused lately, and of one more request or sample in the part
that is refused at any limit. What is refused lately must be known soon, and what is usual must not follow chance."""
_SHORTEST_PATIENCE_SECONDS, _PATIENCE_IN_REFUSALS = 0.1, 4
"""A request was accepted if it is not refused in so many times the time that refusals take."""
_REFUSAL_SECONDS_WEIGHT = 0.9
"""The weight of the slowest of the earlier refusals in that time: it must be forgotten some time."""
_SAMPLE_SIZE = 16
"""The fewest starts that a part is counted of. Half of them are enough below one in flight, where they take long."""
_FIRST_LIMIT = 32.0
"""The limit if many are refused and nothing was ever accepted: the number in flight shows nothing then."""
_LARGEST_CUT, _CUT_IF_ALL_REFUSED, _LARGEST_TEST_CUT = 1 / 4, 1 / 2, 1 / 16
"""The least part of the limit that a cut leaves: a sample may show too many refusals by chance. A test may go
lower, since it is over soon."""
_SECONDS_IF_ALL_REFUSED = 0.5
"""The time between two cuts if nothing is accepted. It may be an outage, in which the limit says nothing."""
_LEAST_RATE = 1.0
"""The limit lets at least so many start in a second, or one be in flight if that takes longer."""
_SAMPLES_TO_BLOCK = 2
"""If so many samples in a row were refused whole, all requests wait until the time of Retry-After."""
_CUTS_TO_TEST, _TEST_SECONDS = 3, 0.25
"""This number of cuts in a row should have reached any limit. The two samples of a test take at least this time each,
so that a burst that the upstream accepts at once does not decide."""
_LEAST_TEST_STARTS, _LONGEST_TEST_SECONDS = 4, 2.0
"""A sample of a test ends after this time if it has so many starts: at a low limit the search must go on soon."""
_GROWTH_PER_SAMPLE = 1.02
"""While nothing at all is refused, the limit creeps up between probes."""
_FIRST_GROWTH, _GROWTH_OF_GROWTH, _LARGEST_GROWTH = 0.04, 8.0, 1.0
"""A probe adds a little first, and more while that is accepted: an upstream that has grown is soon known."""
_USUAL_GROWTH = 4
"""A probe adds so many times the part that is refused anyway. Otherwise chance would decide."""
_SECONDS_BETWEEN_PROBES, _LONGEST_PROBE_SECONDS = 1.0, 0.5
"""A limit that was lifted must be noticed within seconds. A probe ends after this time if what it added was started."""
_LONGEST_HOLD_SECONDS = 2.0
"""A limit is held for a sample before a probe, or for this time if requests take too long for a sample."""
_USED_PART = 0.85
"""If a smaller part of the slots was taken, the limit did not limit anything."""


class _Phase(Enum):
    UNLIMITED = "unlimited"
    HOLD = "hold"
    PROBE = "probe"
    TEST = "test"


class RefusalLimit:
    """The limit on the requests of one model, and the search for it."""

    def __init__(self) -> None:
        self._slots = Slots()
        self._phase = _Phase.UNLIMITED
        self._sample: Sample | None = None
        self._set_after = 0
        """The starts up to this one were made before the limit was set, and say nothing about it."""
        self._set_at = 0.0
        self._held = False
        """Whether the limit was held for a sample."""
        self._recent = 0.0
        """The part of the last requests that was refused."""
        self._usual = 0.0
        """The part that is refused at any limit."""
        self._most_usual = _FEW
        """The largest part that a test has shown to be refused at any limit, or few if there was no test."""
        self._refusal_seconds = 0.0
        self._cuts = 0
        """How often in a row the limit was cut, and what it was before."""
        self._before_cuts: float | None = None
        self._part_before: float | None = None
        """The part that was refused in the first sample of a test, while the second one is counted."""
        self._good = inf
        """The limit to return to after a probe."""
        self._growth = 0.0
        self._probes = 0
        self._next_probe = 0.0
        self.blocked_until = 0.0
        """When the next request may start, as the upstream said."""
        self._retry_at = 0.0
        self._refused_samples = 0
        """How many samples in a row were refused whole."""

    @property
    def is_limiting(self) -> bool:
        return self._phase is not _Phase.UNLIMITED

    @property
    def limit(self) -> float:
        """How many may be in flight on average; infinity if that is not limited."""
        return self._slots.limit

    @property
    def started(self) -> int:
        """How many were started in all."""
        return self._slots.started

    @property
    def rate(self) -> float | None:
        """How many start in a second at this limit; None if that is not limited."""
        return self.limit / self._slots.usual_seconds if self.is_limiting else None

    def allowance(self, in_flight: int, now: float) -> float:
        """Return how many may start beside those that are in flight, and begin a probe if it is time for one.

        A probe needs requests that wait for a slot, and nothing else knows whether there are any.
        """
        if self.is_limiting:
            self._consider_sample(now)
        if not self.is_limiting:
            return inf
        if now < self.blocked_until:
            return 0
        free = self._slots.free(in_flight, now)
        if self._phase is _Phase.HOLD and now >= self._probe_at and self._slots.is_full(in_flight, now):
            self._probe(self._first_growth, now)
            free = self._slots.free(in_flight, now)
        return free

    def wait(self, in_flight: int, now: float) -> float:
        """Return the seconds until this may let one start without another one ending; 0 if it lets one start now."""
        if not self.is_limiting:
            return 0.0
        if now < self.blocked_until:
            return self.blocked_until - now
        if self._slots.free(in_flight, now) > 0:
            return 0.0
        times = [self._slots.next_free(in_flight, now)]
        if self._phase is _Phase.HOLD and self._slots.is_full(in_flight, now):
            times.append(self._probe_at)
        if self._sample is not None:
            times.append(self._sample.complete_at)
        first = min(times)
        return max(0.0, first - now) if first < inf else 0.0

    def on_start(self, now: float, count: int, in_flight: int) -> None:
        """Report so many starts, with so many in flight including them."""
        self._slots.on_start(now, count, in_flight)
        if self._sample is not None:
            self._sample.on_start(now, count, patience=self._patience)

    def on_answer(self, start: Start, now: float) -> None:
        self._slots.on_answer(now - start.at)
        self._recent -= _RECENT_WEIGHT * self._recent
        self._refused_samples = 0
        if self.is_limiting:
            self._consider_sample(now)
        else:
            self._usual -= _USUAL_WEIGHT * self._usual

    def on_refusal(self, start: Start, now: float, *, retry_after: float | None) -> bool:
        """Learn from a refusal, and return whether the search for the limit provoked it."""
        self._refusal_seconds = max(_REFUSAL_SECONDS_WEIGHT * self._refusal_seconds, now - start.at)
        self._recent += _RECENT_WEIGHT * (1 - self._recent)
        if retry_after:
            self._retry_at = max(self._retry_at, now + min(MAX_RETRY_AFTER_SECONDS, retry_after))
        if not self.is_limiting:
            self._learn_usual_unlimited()
            if self._recent > max(_MANY, self._tolerated):
                self._hold(self._accepted_beside(start), now)
            return False
        if start.order <= self._set_after:
            # Those that started before the limit was set may show that it is still too high.
            if self._phase is _Phase.HOLD and not self._cuts and self._accepted_beside(start) < self.limit:
                self._hold(self._accepted_beside(start), now)
            return True
        provoked = self._phase is _Phase.PROBE
        self._slots.on_refusal(start.at)
        if self._sample is not None:
            self._sample.on_refusal(start.order)
        self._consider_sample(now)
        return provoked

    def on_other_refusal(self, start: Start) -> None:
        """Note a refusal that is about its line alone."""
        if self.is_limiting and start.order > self._set_after:
            self._slots.on_refusal(start.at)

    def give_up(self) -> None:
        """Limit nothing: more than are in flight would be accepted, or the refusals are about the lines."""
        self._slots.set_limit(inf)
        self._phase, self._sample = _Phase.UNLIMITED, None
        self._end_cuts()

    def on_outage_over(self, now: float) -> None:
        """Return quickly to what was accepted before an outage, in which nothing was learned."""
        self.blocked_until = self._retry_at = self._recent = 0.0
        self._refused_samples = 0
        if self.is_limiting:
            self._return_from_cuts(now)
            self._probe(_LARGEST_GROWTH, now)

    @property
    def _patience(self) -> float:
        return max(_SHORTEST_PATIENCE_SECONDS, _PATIENCE_IN_REFUSALS * self._refusal_seconds)

    @property
    def _tolerated(self) -> float:
        """The largest part that may be refused without any consequence."""
        return max(_FEW, _TOLERANCE * self._usual + _FEW / 2)

    @property
    def _first_growth(self) -> float:
        """The part of the limit that a probe adds first."""
        return max(_FIRST_GROWTH, _USUAL_GROWTH * self._usual)

    @property
    def _probe_at(self) -> float:
        return self._next_probe + (0.0 if self._held else _LONGEST_HOLD_SECONDS)

    def _accepted_beside(self, start: Start) -> float:
        """Return how many were in flight when a request was refused: the upstream accepted those."""
        return max(1.0, start.model_in_flight - 1) if self._slots.latency_seconds else _FIRST_LIMIT

    def _set_limit(self, limit: float, phase: _Phase, now: float) -> None:
        self._slots.set_limit(max(min(1.0, _LEAST_RATE * self._slots.usual_seconds), limit))
        self._phase, self._set_at = phase, now

    def _hold(self, limit: float, now: float) -> None:
        self._set_limit(limit, _Phase.HOLD, now)
        self._good, self._held = self.limit, False
        self._set_after = self._slots.started
        # Probes are not evenly spaced: the same lines might be ready for each of them, and be refused each time.
        self._probes += 1
        self._next_probe = now + _SECONDS_BETWEEN_PROBES * (0.5 + self._probes * GOLDEN_RATIO % 1)
        self._begin_sample(now)

    def _begin_sample(self, now: float, *, least: int = 0, seconds: float = 0.0, most_seconds: float = inf) -> None:
        size = max(_SAMPLE_SIZE, ceil(self.limit)) if self.limit >= 1 or seconds else _SAMPLE_SIZE // 2
        self._sample = Sample(
            now,
            after=self._slots.started,
            size=size,
            least=least,
            seconds=seconds,
            most_seconds=most_seconds,
            whole=seconds > 0 or self._usual >= _FEW,
        )

    def _consider_sample(self, now: float) -> None:
        sample = self._sample
        if sample is None or not sample.is_complete(now):
            return
        if self._phase is _Phase.PROBE:
            self._end_probe(sample.refused_part, now)
        elif self._phase is _Phase.TEST:
            self._go_on_with_test(sample.refused_part, now)
        else:
            self._held = True
            self._begin_sample(now)
            if sample.refused > 1 and sample.refused_part > self._tolerated:
                self._cut(sample.refused_part, now)
            else:
                self._end_cuts()
                self._learn_usual(sample.refused_part)

    def _learn_usual(self, part: float) -> None:
        self._usual += _USUAL_SAMPLE_WEIGHT * (min(max(_FEW, self._usual), part) - self._usual)
        if part < _NONE and self._slots.most_taken + 1 >= self.limit:
            self._slots.limit *= _GROWTH_PER_SAMPLE
            self._good = self.limit

    def _learn_usual_unlimited(self) -> None:
        """Count a refusal without a limit: it may be about a limit unless a test has shown that it is not."""
        most = 1.0 if self._most_usual > _FEW else _FEW
        self._usual = min(self._most_usual, self._usual + _USUAL_WEIGHT * max(0.0, most - self._usual))

    def _cut(self, part: float, now: float) -> None:
        """Lower the limit to the part that was accepted."""
        kept = max(_LARGEST_CUT, 1 - part)
        if part >= _ALL:
            self._refused_samples += 1
            if self._refused_samples >= _SAMPLES_TO_BLOCK and self._retry_at > now:
                self._block(now)
                return
            if now - self._set_at < _SECONDS_IF_ALL_REFUSED:
                return
            kept = _CUT_IF_ALL_REFUSED
        elif self._cuts >= _CUTS_TO_TEST:
            self._begin_test(self.limit, now)
            return
        if self._before_cuts is None:
            self._before_cuts = self.limit
        self._cuts += 1
        self._hold(self.limit * kept, now)

    def _end_cuts(self) -> None:
        self._cuts, self._before_cuts = 0, None

    def _return_from_cuts(self, now: float) -> None:
        """Hold the limit that there was before the last cuts."""
        limit = self.limit if self._before_cuts is None else self._before_cuts
        self._end_cuts()
        self._hold(limit, now)

    def _block(self, now: float) -> None:
        """Wait until the time of Retry-After. Then as many are accepted as before the refusals."""
        self._refused_samples, self.blocked_until = 0, self._retry_at
        self._return_from_cuts(now)

    def _begin_test(self, limit: float, now: float, *, part_before: float | None = None) -> None:
        self._hold(limit, now)
        self._phase, self._part_before = _Phase.TEST, part_before
        self._begin_sample(now, least=_LEAST_TEST_STARTS, seconds=_TEST_SECONDS, most_seconds=_LONGEST_TEST_SECONDS)

    def _go_on_with_test(self, part: float, now: float) -> None:
        """After the first sample, go on with a limit at which nothing is refused if it is about the limit."""
        before = self._part_before
        if before is None:
            self._begin_test(self.limit * max(_LARGEST_TEST_CUT, min(0.5, 1 - part)), now, part_before=part)
        elif part > before / 2 and before < 1 - _LARGEST_TEST_CUT:
            self._usual, self._most_usual = part, max(_FEW, part)
            self._return_from_cuts(now)
            self._probe(_LARGEST_GROWTH, now)
        else:
            self._cuts = 0
            self._hold(self.limit * (1 - part), now)
            # The test has held it for a sample.
            self._held = True

    def _probe(self, growth: float, now: float) -> None:
        self._growth = min(_LARGEST_GROWTH, growth)
        added = self._good * self._growth
        self._set_limit(self._good + (max(1.0, added) if self._good >= 1 else added), _Phase.PROBE, now)
        self._begin_sample(now, least=ceil(self.limit - self._good), most_seconds=_LONGEST_PROBE_SECONDS)

    def _end_probe(self, part: float, now: float) -> None:
        """Return to the limit if half of what was added is refused; else add more, or limit nothing any more."""
        added = 1 - self._good / self.limit
        if part >= self._usual + added / 2:
            self._hold(self._good, now)
        elif self._good >= 1 and self._slots.most_taken < _USED_PART * self.limit:
            self.give_up()
        else:
            self._end_cuts()
            self._good = self.limit
            self._probe(_GROWTH_OF_GROWTH * self._growth, now)
