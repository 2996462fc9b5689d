"""Learns from refusals (429, and 503 if it comes quickly) how many requests of a model its upstream accepts.

Some upstreams refuse what exceeds a number in flight, others what exceeds a rate. By Little's law both are one: a rate
is a number in flight divided by the latency. So only one number is searched for, the *limit*. It may be a fraction
(`slots.py`)::

                 many are refused               now and then
    unlimited ────────────────────> hold <══════════════════════> probe: a little more, then much more
        ^                         ^ │ ^                             │
        │                         │ │ └─ many are refused:          │
        │                         │ │    as many as were accepted   │
        │                         │ └──> test: after one such cut,  │
        │                         └────────┘ and after three        │
        └───────────────────────────────────────────────────────────┘
                    more than are in flight would be accepted

A cut keeps the part of the limit that was accepted, which is right for both kinds of upstreams. If every request beyond
a number in flight was refused and no other, that number is held. If as large a part is refused again and again, however
low the limit is, a *test* compares two limits: if the part is the same at both, the refusals are not about the limit
and are tolerated. Before the second cut in a row, but seldom, a test compares the limit with twice of it: as long as
more are accepted the more are sent, the refusals are tolerated too. So it is with a balancer that chooses by chance
among servers of which some are full. A small part is always tolerated: it shows that the upstream is full, and the
refused lines are tried again. If all are refused, and the upstream says until when, starts are held up (`block.py`).
"""

from enum import Enum
from math import ceil, floor, inf, log2, sqrt

from batchline.domain.retry import MAX_RETRY_AFTER_SECONDS
from batchline.pipeline.dispatch.limiter.block import Block
from batchline.pipeline.dispatch.limiter.load import Start
from batchline.pipeline.dispatch.limiter.sample import Sample
from batchline.pipeline.dispatch.limiter.slots import GOLDEN_RATIO, Slots

_FEW, _MANY, _ALL = 0.12, 0.25, 0.99
"""Parts of the requests. If few are refused, nothing is done. If many of the last ones are, there is a limit. If all
are, no lower limit can be derived from them."""
_TOLERANCE = 1.3
"""A part that is refused at any limit may grow by this factor before the limit is taken as the cause."""
_NONE = 0.02
"""While at most this part is refused, the upstream may not be full."""
_RECENT_WEIGHT, _USUAL_WEIGHT, _USUAL_SAMPLE_WEIGHT = 1 / 16, 1 / 64, 0.2
"""The weights of one more request in the part that was refused lately, and of one more request or sample in the part
that is refused at any limit. The first must follow changes soon, and the others must not follow chance."""
_SHORTEST_PATIENCE_SECONDS, _PATIENCE_IN_REFUSALS = 0.1, 4
"""A request counts as accepted if it was not refused within so many times the time that refusals take."""
_REFUSAL_SECONDS_WEIGHT = 0.9
"""The part of the longest earlier refusal time that remains after each refusal, so that it is forgotten in the end."""
_SAMPLE_SIZE = 16
"""The fewest starts in a sample. Half as many are enough at a limit below 1, where they take long."""
_FIRST_LIMIT = 32.0
"""The first limit if many are refused and none was ever accepted: the number in flight shows nothing then."""
_LEAST_DOUBTED = 2.0
"""A few refusals too many may be chance if the limit is at least this. Below it, one request more is much more."""
_LARGEST_CUT, _CUT_IF_ALL_REFUSED, _LARGEST_TEST_CUT = 1 / 4, 1 / 2, 1 / 16
"""The least part of the limit that a cut leaves, because a sample may show too many refusals by chance. A test may go
lower, since it is over soon."""
_SECONDS_IF_ALL_REFUSED = 0.5
"""The time between two cuts if all are refused. It may be an outage, which has nothing to do with the limit."""
_LEAST_RATE = 1.0
"""The limit lets at least so many start in a second, or one be in flight if answers take longer."""
_LEAST_COST = 0.5
"""A refusal costs its line at least this much, so that a line that is always refused fails in the end."""
_CUTS_TO_TEST, _TEST_SECONDS = 3, 0.25
"""After this number of cuts in a row, which should have reached any limit, a test begins. Each of its two samples takes
at least this time, so that a burst that the upstream accepts at once does not decide."""
_LEAST_TEST_STARTS, _LONGEST_TEST_SECONDS = 4, 2.0
"""A sample of a test ends after this time if it has so many starts, so that the search goes on soon at a low limit."""
_TEST_GROWTH, _WORTHWHILE_GROWTH = 2.0, sqrt(2.0)
"""A test upwards raises the limit by the first factor. If the number that is accepted grows by the second one, about
half of those that were added are accepted, as in a probe."""
_UPWARD_TEST_STARTS, _LONGEST_UPWARD_TEST_SECONDS = 64, 10.0
"""The fewest starts in each sample of such a test. With these, the growth that is measured is off by about 12 %. If
they would take longer than this time, there is no such test: a change of the upstream must be noticed by then."""
_SHORTEST_UPWARD_REST_SECONDS, _LONGEST_UPWARD_REST_SECONDS = 5.0, 80.0
"""The time after such a test in which there is no other one. It doubles with each test that shows a limit, so that an
upstream with a limit refuses few more."""
_LARGEST_TESTED_PART = 0.5
"""If a larger part is refused, there is no such test, because it would provoke still more refusals."""
_GROWTH_PER_SAMPLE = 1.02
"""The limit grows by this factor with each sample in which nothing is refused."""
_FIRST_GROWTH, _GROWTH_OF_GROWTH, _LARGEST_GROWTH = 0.04, 8.0, 1.0
"""A probe adds a little first, and more while that is accepted, so that a much higher limit is found soon."""
_USUAL_GROWTH = 4
"""A probe adds at least so many times the part that is refused at any limit. Otherwise chance would decide."""
_SECONDS_BETWEEN_PROBES, _LONGEST_PROBE_SECONDS = 1.0, 0.5
"""The end of a limit must be noticed within seconds. A probe ends after the second time if the requests that it added
were started."""
_LONGEST_HOLD_SECONDS = 2.0
"""A limit is held for a sample before a probe, or for this time if requests take too long for a sample."""
_USED_PART = 0.85
"""If a smaller part of the slots was taken, the limit held back nothing."""


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
        """The number of the last start before the limit was set. Starts up to it say nothing about the limit."""
        self._set_at = 0.0
        self._held = False
        """Whether the limit was held for a sample."""
        self._recent = 0.0
        """The part of the last requests that was refused."""
        self._usual = 0.0
        """The part that is refused at any limit."""
        self._most_usual = _FEW
        """The largest part that a test has shown to be refused at any limit, or few if there was no test."""
        self._is_in_doubt = False
        """Whether the last sample had a few refusals too many, which may be chance. The next sample decides."""
        self._refusal_seconds = 0.0
        self._cuts = 0
        """The number of cuts in a row. ``_before_cuts`` is the limit before them."""
        self._before_cuts: float | None = None
        self._part_before: float | None = None
        """The part that was refused in the first sample of a test, while the second one is counted."""
        self._next_upward_test = 0.0
        self._upward_rest_seconds = _SHORTEST_UPWARD_REST_SECONDS
        self._tests_upwards = False
        """Whether the second limit of the present test is the higher one."""
        self._good = inf
        """The limit to return to after a probe."""
        self._growth = 0.0
        self._probes = 0
        self._next_probe = 0.0
        self._block = Block()
        self._retry_at = 0.0
        """The latest time that a Retry-After named."""

    @property
    def is_limiting(self) -> bool:
        return self._phase is not _Phase.UNLIMITED

    @property
    def limit(self) -> float:
        """The number of requests that may be in flight on average; infinity if that is not limited."""
        return self._slots.limit

    @property
    def blocked_until(self) -> float:
        """The time at which requests may start again, as the upstream said with Retry-After; 0 if it did not."""
        return self._block.until

    @property
    def started(self) -> int:
        """The number of requests that were started in all."""
        return self._slots.started

    @property
    def latency_seconds(self) -> float:
        """The mean latency of the last answers; 0 while there was none."""
        return self._slots.latency_seconds

    @property
    def rate(self) -> float | None:
        """The number of requests that start in a second at this limit; None if that is not limited."""
        return self.limit / self._slots.usual_seconds if self.is_limiting else None

    def allowance(self, in_flight: int, now: float) -> float:
        """Return the number of requests that may start beside those in flight, and begin a probe if one is due.

        A probe needs requests that wait for a slot. They do when this is called, and nothing else shows that.
        """
        if self.is_limiting:
            self._consider_sample(now)
        if not self.is_limiting:
            return inf
        if self._is_blocked(now):
            return int(self._block.may_try(now))
        free = self._slots.free(in_flight, now)
        if self._phase is _Phase.HOLD and now >= self._probe_at and self._slots.is_full(in_flight, now):
            self._probe(self._first_growth, now)
            free = self._slots.free(in_flight, now)
        return free

    def wait(self, in_flight: int, now: float) -> float:
        """Return the seconds until a request may start even if none ends; 0 if it may now, or if one must end first."""
        if not self.is_limiting:
            return 0.0
        if self._is_blocked(now):
            return self._block.wait(now)
        if self._slots.free(in_flight, now) > 0:
            return 0.0
        times = [self._slots.next_free(in_flight, now)]
        if self._phase is _Phase.HOLD and self._slots.is_full(in_flight, now):
            times.append(self._probe_at)
        if self._sample is not None:
            times.append(self._sample.complete_at)
        first = min(times)
        return max(0.0, first - now) if first < inf else 0.0

    def may_try_first(self, now: float) -> bool:
        """Return whether a line of a project that was not refused may start although the model is blocked."""
        return self._is_blocked(now) and self._block.may_try(now, first=True)

    def on_start(self, now: float, count: int, in_flight: int) -> None:
        """Report ``count`` starts. ``in_flight`` includes them."""
        self._slots.on_start(now, count, in_flight)
        if self._is_blocked(now):
            self._block.on_try(now, self._slots.started, patience=self._patience)
        elif self._sample is not None:
            self._sample.on_start(now, count, in_flight, patience=self._patience)

    def on_answer(self, start: Start, now: float) -> None:
        self._slots.on_answer(now - start.at)
        self._block.on_answer(start.order, now)
        self._recent -= _RECENT_WEIGHT * self._recent
        if self.is_limiting:
            self._consider_sample(now)
        else:
            self._usual -= _USUAL_WEIGHT * self._usual

    def on_refusal(self, start: Start, now: float, *, retry_after: float | None) -> float:
        """Learn from a refusal, and return its cost to the line: 0 if the search for the limit provoked it, else 1.

        The cost is lower if most requests are refused, so that no line fails by chance.
        """
        self._block.on_refusal(start.order)
        self._refusal_seconds = max(_REFUSAL_SECONDS_WEIGHT * self._refusal_seconds, now - start.at)
        self._recent += _RECENT_WEIGHT * (1 - self._recent)
        if retry_after:
            self._retry_at = max(self._retry_at, now + min(MAX_RETRY_AFTER_SECONDS, retry_after))
        if not self.is_limiting:
            self._learn_usual_unlimited()
            if self._recent > max(_MANY, self._tolerated):
                self._hold(self._accepted_beside(start), now)
            return self.cost
        if start.order <= self._set_after:
            # Those that started before the limit was set may show that it is still too high.
            accepted, is_usual = self._accepted_beside(start), self._usual > _FEW
            if self._phase is _Phase.HOLD and not self._cuts and not is_usual and accepted < self.limit:
                self._hold(accepted, now)
            return 0.0
        if self._is_blocked(now):
            self._block.begin(self._retry_at, now)
            return 0.0
        cost = 0.0 if self._tries_more else self.cost
        self._slots.on_refusal(start.at)
        if self._sample is not None:
            self._sample.on_refusal(start.order)
        self._consider_sample(now)
        return cost

    def on_other_refusal(self, start: Start) -> None:
        """Note a refusal that is only about its line."""
        self._block.on_refusal(start.order)
        if self.is_limiting and start.order > self._set_after:
            self._slots.on_refusal(start.at)

    def measure_again(self, now: float) -> None:
        """Begin the present sample again, because a request was among its starts that was likely to be refused."""
        if self.is_limiting:
            self._hold(self._good, now)

    def give_up(self) -> None:
        """Remove the limit: more requests than are in flight would be accepted, or the refusals are about the lines."""
        self._slots.set_limit(inf)
        self._block.end()
        self._retry_at = 0.0
        self._phase, self._sample = _Phase.UNLIMITED, None
        self._end_cuts()

    def on_outage_over(self, now: float) -> None:
        """Return quickly to the limit before an outage, and forget the refusals of the outage."""
        self._block.end()
        self._retry_at = self._recent = 0.0
        if self.is_limiting:
            self._return_from_cuts(now)
            self._probe(_LARGEST_GROWTH, now)

    @property
    def cost(self) -> float:
        """The cost of a refusal: 1, but less if more than half of the requests are refused, or some at any limit."""
        if self._usual > _FEW:
            return _LEAST_COST
        return max(_LEAST_COST, min(1.0, -log2(max(_NONE, self._recent))))

    @property
    def _tries_more(self) -> bool:
        """Whether more are started than the upstream is known to accept."""
        return self._phase is _Phase.PROBE or (self._phase is _Phase.TEST and self._tests_upwards)

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
        """Return the number that was in flight when a refused request started: the upstream had accepted those."""
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
        size = max(_SAMPLE_SIZE, ceil(self.limit), least) if self.limit >= 1 or seconds else _SAMPLE_SIZE // 2
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
            self._judge(sample, now)

    def _judge(self, sample: Sample, now: float) -> None:
        """Hold the number that was accepted if there is one, cut if too many were refused, or learn what is usual."""
        part, number = sample.refused_part, sample.accepted_number
        was_in_doubt, self._is_in_doubt = self._is_in_doubt, False
        too_many = sample.refused > 1 and part > self._tolerated
        if number is not None and self.limit * (1 - part) <= number < self.limit:
            self._end_cuts()
            self._hold(float(number), now)
        elif too_many and part < _MANY and self.limit >= _LEAST_DOUBTED and not was_in_doubt:
            self._is_in_doubt = True
        elif too_many:
            self._cut(part, now)
        else:
            self._end_cuts()
            self._learn_usual(part)

    def _learn_usual(self, part: float) -> None:
        self._usual += _USUAL_SAMPLE_WEIGHT * (min(max(_FEW, self._usual), part) - self._usual)
        if part >= _NONE:
            return
        self._slots.speed_up()
        if self._slots.most_taken + 1 >= self.limit:
            self._slots.limit *= _GROWTH_PER_SAMPLE
            self._good = self.limit

    def _learn_usual_unlimited(self) -> None:
        """Count a refusal while there is no limit.

        It may be about a limit, so it raises the usual part only up to few, or up to the part that a test has shown.
        """
        most = 1.0 if self._most_usual > _FEW else _FEW
        self._usual = min(self._most_usual, self._usual + _USUAL_WEIGHT * max(0.0, most - self._usual))

    def _cut(self, part: float, now: float) -> None:
        """Lower the limit to the part that was accepted."""
        kept = max(_LARGEST_CUT, 1 - part)
        if part >= _ALL:
            if self._retry_at > now:
                self._begin_block(now)
                return
            if now - self._set_at < _SECONDS_IF_ALL_REFUSED:
                return
            kept = _CUT_IF_ALL_REFUSED
        elif self._cuts and part < _LARGEST_TESTED_PART and self._may_test_upwards(now):
            self._begin_test(self.limit, now, upwards=True)
            return
        elif self._cuts >= _CUTS_TO_TEST:
            self._begin_test(self.limit, now, upwards=False)
            return
        if self._before_cuts is None:
            self._before_cuts = self.limit
        self._cuts += 1
        self._slots.slow_down()
        self._hold(self.limit * kept, now)

    def _may_test_upwards(self, now: float) -> bool:
        """Return whether a test upwards is due, and its starts take no longer than they may."""
        seconds = _UPWARD_TEST_STARTS * self._slots.usual_seconds / self.limit
        return now >= self._next_upward_test and seconds <= _LONGEST_UPWARD_TEST_SECONDS

    def _end_cuts(self) -> None:
        self._cuts, self._before_cuts = 0, None

    def _return_from_cuts(self, now: float) -> None:
        """Hold the limit from before the last cuts."""
        limit = self.limit if self._before_cuts is None else self._before_cuts
        self._end_cuts()
        self._hold(limit, now)

    def _begin_block(self, now: float) -> None:
        """Hold up all starts until the time of Retry-After, and return to the limit from before the refusals."""
        self._block.begin(self._retry_at, now)
        self._return_from_cuts(now)

    def _is_blocked(self, now: float) -> bool:
        """Return whether starts are held up by Retry-After. The lines that were tried meanwhile are in no sample."""
        if not self._block.until:
            return False
        if self._block.is_on(now) and not self._block.is_accepted(now):
            return True
        self._block.end()
        self._retry_at = 0.0
        self._set_after = self._slots.started
        self._begin_sample(now)
        return False

    def _begin_test(self, limit: float, now: float, *, upwards: bool, part_before: float | None = None) -> None:
        self._hold(limit, now)
        self._phase, self._tests_upwards, self._part_before = _Phase.TEST, upwards, part_before
        least = _UPWARD_TEST_STARTS if upwards else _LEAST_TEST_STARTS
        self._begin_sample(now, least=least, seconds=_TEST_SECONDS, most_seconds=_LONGEST_TEST_SECONDS)

    def _go_on_with_test(self, part: float, now: float) -> None:
        """Begin the second sample of a test at another limit, or decide after it whether the limit is the cause."""
        before = self._part_before
        if before is None:
            upwards = self._tests_upwards and part < _LARGEST_TESTED_PART
            factor = _TEST_GROWTH if upwards else max(_LARGEST_TEST_CUT, min(0.5, 1 - part))
            self._begin_test(self.limit * factor, now, upwards=upwards, part_before=part)
        elif self._is_tolerable(part, before):
            self._usual, self._most_usual = part, max(_FEW, part)
            self._return_from_cuts(now)
            self._probe(_LARGEST_GROWTH, now)
        else:
            self._cuts = 0
            if self._tests_upwards:
                self._slots.slow_down()
                self._next_upward_test = now + self._upward_rest_seconds
                self._upward_rest_seconds = min(_LONGEST_UPWARD_REST_SECONDS, 2 * self._upward_rest_seconds)
            self._hold(self.limit * (1 - part), now)
            # The test has held the limit for a sample.
            self._held = True

    def _is_tolerable(self, part: float, before: float) -> bool:
        """Return whether the parts that were refused at the two limits of a test show that no lower limit is better."""
        if self._tests_upwards:
            return _TEST_GROWTH * (1 - part) > _WORTHWHILE_GROWTH * (1 - before)
        return part > before / 2 and before < 1 - _LARGEST_TEST_CUT

    def _probe(self, growth: float, now: float) -> None:
        self._growth = min(_LARGEST_GROWTH, growth)
        more = self._good * (1 + self._growth)
        # A whole number more may be accepted where a fraction beyond it is not.
        self._set_limit(max(floor(self._good + 1), more) if self._good >= 1 else more, _Phase.PROBE, now)
        self._begin_sample(now, least=ceil(self.limit - self._good), most_seconds=_LONGEST_PROBE_SECONDS)

    def _end_probe(self, part: float, now: float) -> None:
        """Return to the limit if half of the added requests are refused; else add more, or remove the limit.

        The part that is refused at any limit is refused of the added requests too.
        """
        added = 1 - self._good / self.limit
        if part >= self._usual + (1 - self._usual) * added / 2:
            self._hold(self._good, now)
        elif self._good >= 1 and self._slots.most_taken < _USED_PART * self.limit and self._recent <= _MANY:
            # If many were refused lately, few slots are taken only because those of refused requests do not count.
            self.give_up()
        else:
            self._end_cuts()
            self._good = self.limit
            if self._usual > _FEW:
                self._usual = max(self._usual, part)
            self._probe(_GROWTH_OF_GROWTH * self._growth, now)
