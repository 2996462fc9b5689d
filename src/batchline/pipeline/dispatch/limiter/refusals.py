"""Learns from refusals (429, and 503 if it comes quickly) how many requests of a model its upstream accepts.

Some upstreams refuse what exceeds a number in flight, others what exceeds a rate. By Little's law both are one: a rate
is a number in flight divided by the latency. So only one number is searched for, the *limit*. It may be a fraction
(`slots.py`)::

                 many are refused               now and then
    unlimited ────────────────────> hold <══════════════════════> probe: a little more, then much more
        ^                         ^ │ ^                             │
        │                         │ │ └─ many are refused:          │
        │                         │ │    as many as were accepted   │
        │                         │ └──> compare: after one such    │
        │                         └────────┘ cut, and after three   │
        └───────────────────────────────────────────────────────────┘
                    more than are in flight would be accepted

A cut keeps the part of the limit that was accepted, which is right for both kinds of upstreams. If every request beyond
a number in flight was refused and no other, that number is held. If as large a part is refused again and again, however
low the limit is, two limits are compared (`comparison.py`): if the part is the same at both, the refusals are not about
the limit and are tolerated. Before the second cut in a row, but seldom, the limit is compared with twice of it: as long
as more are accepted the more are sent, the refusals are tolerated too. A small part is always tolerated: it shows that
the upstream is full, and the refused lines are tried again (`refused_parts.py`). If all are refused, starts are held up
until the time that the upstream said, or until one line is accepted (`block.py`). If a probe led to that, the next one
comes much later (`probe_rests.py`).

A limit on the rate may refuse any two requests that follow each other too closely. If that is what the refused requests
have in common (`gaps.py`), starts are spaced evenly, and the number in flight does not matter any more.
"""

from collections.abc import Sequence
from enum import Enum
from math import ceil, floor, inf

from batchline.domain.retry import MAX_RETRY_AFTER_SECONDS
from batchline.pipeline.dispatch.limiter import comparison
from batchline.pipeline.dispatch.limiter.block import Block
from batchline.pipeline.dispatch.limiter.comparison import Comparison
from batchline.pipeline.dispatch.limiter.load import Start
from batchline.pipeline.dispatch.limiter.probe_rests import ProbeRests
from batchline.pipeline.dispatch.limiter.refused_parts import ALL, FEW, MANY, NONE, RefusedParts
from batchline.pipeline.dispatch.limiter.sample import Sample
from batchline.pipeline.dispatch.limiter.slots import Slots

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
_LARGEST_CUT, _KEPT_IF_ALL_REFUSED = 1 / 4, 1 / 2
"""The least part of the limit that a cut leaves, because a sample may show too many refusals by chance. If all are
refused, it may be an outage, which has nothing to do with the limit."""
_KEPT_IF_RAISED = 0.95
"""The part of the limit that is kept if all are refused after more was tried: it had grown by a few hundredths."""
_LEAST_RATE = 1.0
"""The limit lets at least so many start in a second, or one be in flight if answers take longer."""
_NEARLY = 1.2
"""A limit that is so many times the lowest one counts as the lowest, which follows the latency."""
_CUTS_TO_COMPARE = 3
"""After this number of cuts in a row, which should have reached any limit, the limit is compared with a lower one."""
_GROWTH_PER_SAMPLE = 1.02
"""The limit grows by this factor with each sample in which nothing is refused."""
_FIRST_GROWTH, _GROWTH_OF_GROWTH, _LARGEST_GROWTH = 0.04, 8.0, 1.0
"""A probe adds a little first, and more while that is accepted, so that a much higher limit is found soon."""
_USUAL_GROWTH = 4
"""A probe adds at least so many times the part that is refused at any limit. Otherwise chance would decide."""
_LONGEST_PROBE_SECONDS = 0.5
"""A probe ends after this time if the requests that it added were started."""
_CLEAR_EVIDENCE, _NO_EVIDENCE = 0.95, 0.6
"""How often accepted requests have more space before them than refused ones: at least the first if that is why they
were accepted, and less than the second if it is not."""
_FEW_SLOTS, _EVEN_GROWTH = 8, 0.25
"""If few are in flight, the numbers in flight seem to tell all refused requests from the accepted ones, even
if what counts is the space between two of them. So evenly spaced starts are tried, with so many more of them."""
_SHORTEST_EVEN_SECONDS = 0.004
"""Timers are not precise enough for shorter even spaces, and would cost more throughput than the refusals."""
_LONGEST_HOLD_SECONDS = 2.0
"""A limit is held for a sample before a probe, or for this time if requests take too long for a sample."""
_USED_PART = 0.85
"""If a smaller part of the slots was taken, the limit held back nothing."""
_USED_RATE = 0.5
"""If evenly spaced starts had a smaller part of their rate, the limit held back nothing. Each may be a little late."""


class _Phase(Enum):
    UNLIMITED = "unlimited"
    HOLD = "hold"
    PROBE = "probe"
    COMPARE = "compare"


class RefusalLimit:
    """The limit on the requests of one model, and the search for it."""

    def __init__(self) -> None:
        self._slots = Slots()
        self._phase = _Phase.UNLIMITED
        self._sample: Sample | None = None
        self._set_after = 0
        """The number of the last start before the limit was set. Starts up to it say nothing about the limit."""
        self._held = False
        """Whether the limit was held for a sample."""
        self._parts = RefusedParts()
        self._is_in_doubt = False
        """Whether the last sample had a few refusals too many, which may be chance. The next sample decides."""
        self._refusal_seconds = 0.0
        self._cuts = 0
        """The number of cuts in a row. ``_before_cuts`` is the limit before them."""
        self._before_cuts: float | None = None
        self._comparison = Comparison()
        self._good = inf
        """The limit to return to after a probe."""
        self._growth = 0.0
        self._rests = ProbeRests()
        self._tries_even = False
        """Whether the present probe spaces starts evenly to find out whether more are accepted then."""
        self._is_raised = False
        """Whether more was tried than in the last sample of which few were refused."""
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
    def accepts_none(self) -> bool:
        """Whether all of the last requests were refused, and the upstream did not say until when."""
        return self._block.until == inf

    @property
    def blocked_until(self) -> float:
        """The time at which requests may start again, as the upstream said with Retry-After; 0 if it did not."""
        return 0.0 if self.accepts_none else self._block.until

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
        if self._check_block(now):
            return int(self._block.may_try(now))
        free = self._slots.free(in_flight, now)
        if self._may_probe and now >= self._probe_at and self._slots.is_full(in_flight, now):
            self._begin_probe(now)
            free = self._slots.free(in_flight, now)
        return free

    def wait(self, in_flight: int, now: float) -> float:
        """Return the seconds until a request may start even if none ends; 0 if it may now, or if one must end first."""
        if not self.is_limiting:
            return 0.0
        if self._check_block(now):
            return self._block.wait(now)
        if self._slots.free(in_flight, now) > 0:
            return 0.0
        times = [self._slots.next_free(in_flight, now)]
        if self._may_probe and self._slots.is_full(in_flight, now):
            times.append(self._probe_at)
        if self._sample is not None:
            times.append(self._sample.complete_at)
        first = min(times)
        return max(0.0, first - now) if first < inf else 0.0

    def may_try_first(self, now: float) -> bool:
        """Return whether a line of a project that was not refused may start although the model is blocked."""
        return self._check_block(now) and self._block.may_try(now, first=True)

    def on_start(self, now: float, count: int, in_flight: int) -> None:
        """Report ``count`` starts. ``in_flight`` includes them."""
        self._slots.on_start(now, count, in_flight)
        if self._check_block(now):
            self._block.on_try(now, self._slots.started, patience=self._patience)
        elif self._sample is not None:
            self._sample.on_start(now, count, in_flight, patience=self._patience)

    def on_answers(self, starts: Sequence[Start], now: float) -> None:
        self._slots.on_answers([now - start.at for start in starts])
        self._parts.on_answers(len(starts), limited=self.is_limiting)
        if self.is_limiting:
            self._rests.on_answers(len(starts))
            for start in starts:
                self._block.on_answer(start.order, now)
            self._consider_sample(now)

    def on_refusal(self, start: Start, now: float, *, retry_after: float | None) -> float:
        """Learn from a refusal, and return its cost to the line: 0 if the search for the limit provoked it."""
        self._block.on_refusal(start.order)
        self._refusal_seconds = max(_REFUSAL_SECONDS_WEIGHT * self._refusal_seconds, now - start.at)
        self._parts.on_refusal(limited=self.is_limiting)
        if retry_after:
            self._retry_at = max(self._retry_at, now + min(MAX_RETRY_AFTER_SECONDS, retry_after))
        if not self.is_limiting:
            if self._parts.recent > max(MANY, self._parts.tolerated):
                self._hold(self._accepted_beside(start), now)
            return self.cost
        if start.order <= self._set_after:
            accepted = self._accepted_beside(start)
            if self._is_untried and accepted < self.limit:
                self._hold(accepted, now)
            return 0.0
        if self._check_block(now):
            if self._retry_at <= now:
                return 0.0 if self._block.is_young(now) else self.cost
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
        if self._sample is not None:
            self._sample.on_other_refusal(start.order)

    def measure_again(self, now: float) -> None:
        """Begin the present sample again, because a request was among its starts that was likely to be refused."""
        if self.is_limiting:
            self._hold(self._good, now)

    def give_up(self) -> None:
        """Remove the limit: more requests than are in flight would be accepted, or the refusals are about the lines."""
        self._slots.set_limit(inf)
        self._slots.space_freely()
        self._block.end()
        self._retry_at, self._is_raised, self._tries_even = 0.0, False, False
        self._phase, self._sample = _Phase.UNLIMITED, None
        self._end_cuts()

    def on_outage_over(self, now: float) -> None:
        """Return quickly to the limit before an outage, and forget the refusals of the outage."""
        self._end_block(now)
        self._parts.forget_recent()
        if self.is_limiting:
            self._return_from_cuts(now)
            if not self._rests.are_long(now):
                self._probe(_LARGEST_GROWTH, now)

    @property
    def cost(self) -> float:
        """The cost of a refusal to its line."""
        return self._parts.cost

    @property
    def _tries_more(self) -> bool:
        """Whether more are started than the upstream is known to accept."""
        return self._phase is _Phase.PROBE or (self._phase is _Phase.COMPARE and self._comparison.is_upwards)

    @property
    def _is_untried(self) -> bool:
        """Whether requests that had started before the limit was set may show that it is still too high.

        If more than a known limit was tried, or everything is refused, theirs were refused whatever the limit is.
        """
        is_known = self._cuts or self._is_raised or self._block.until or self._parts.usual > FEW
        return self._phase is _Phase.HOLD and not is_known

    @property
    def _patience(self) -> float:
        return max(_SHORTEST_PATIENCE_SECONDS, _PATIENCE_IN_REFUSALS * self._refusal_seconds)

    @property
    def _first_growth(self) -> float:
        """The part of the limit that a probe adds first."""
        return max(_FIRST_GROWTH, _USUAL_GROWTH * self._parts.usual)

    @property
    def _lowest(self) -> float:
        """The lowest limit."""
        return min(1.0, _LEAST_RATE * self._slots.usual_seconds)

    @property
    def _seconds_per_start(self) -> float:
        return self._slots.usual_seconds / self.limit

    @property
    def _may_probe(self) -> bool:
        """Whether a limit is held, and its sample does not show yet that too many are refused."""
        if self._phase is not _Phase.HOLD:
            return False
        return self._sample is None or not self._is_refused_too_often(self._sample)

    @property
    def _probe_at(self) -> float:
        return self._rests.next_at + (0.0 if self._held else _LONGEST_HOLD_SECONDS)

    def _accepted_beside(self, start: Start) -> float:
        """Return the number that was in flight when a refused request started: the upstream had accepted those."""
        return max(1.0, start.in_flight_with_slow - 1) if self._slots.latency_seconds else _FIRST_LIMIT

    def _set_limit(self, limit: float, phase: _Phase) -> None:
        self._slots.set_limit(max(self._lowest, limit))
        self._phase = phase

    def _hold(self, limit: float, now: float) -> None:
        if self._tries_even:
            # The probe was not accepted, or did not come to its end.
            self._slots.space_freely()
            self._tries_even = False
        self._set_limit(limit, _Phase.HOLD)
        self._good, self._held = self.limit, False
        self._set_after = self._slots.started
        self._rests.begin(now, is_even=self._slots.is_even)
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
            whole=seconds > 0 or self._parts.usual >= FEW,
        )

    def _consider_sample(self, now: float) -> None:
        sample = self._sample
        if sample is None or not sample.end_if_complete(now):
            return
        if self._phase is _Phase.PROBE:
            self._end_probe(sample, now)
        elif self._phase is _Phase.COMPARE:
            self._go_on_with_comparison(sample.refused_part, now)
        else:
            self._held = True
            self._begin_sample(now)
            self._judge(sample, now)

    def _judge(self, sample: Sample, now: float) -> None:
        """Hold the number that was accepted if there is one, cut if too many were refused, or learn what is usual."""
        part, number = sample.refused_part, sample.accepted_number
        was_in_doubt, self._is_in_doubt = self._is_in_doubt, False
        too_many = self._is_refused_too_often(sample)
        if number is not None and self.limit * (1 - part) <= number < self.limit:
            self._slots.space_freely()
            self._end_cuts()
            self._hold(float(number), now)
        elif too_many and part < MANY and self.limit >= _LEAST_DOUBTED and not was_in_doubt:
            self._is_in_doubt = True
        elif too_many:
            self._choose_spaces(sample)
            self._cut(part, now)
        else:
            self._end_cuts()
            self._parts.on_sample(part)
            self._is_raised = part < NONE and not self._rests.are_long(now) and self._grow()

    def _is_refused_too_often(self, sample: Sample) -> bool:
        """Return whether more of a sample were refused than is tolerated."""
        return sample.refused > 1 and sample.refused_part > self._parts.tolerated

    def _holds_back(self, sample: Sample) -> bool:
        """Return whether the limit held back starts during this sample."""
        if self._slots.is_even:
            return sample.rate >= _USED_RATE * self.limit / self._slots.usual_seconds
        return self._good < 1 or self._slots.most_taken >= _USED_PART * self.limit

    def _has_tried_more(self, sample: Sample) -> bool:
        """Return whether a probe shows something: more were started than the limit before it allowed."""
        return self._holds_back(sample) if self._slots.is_even else self._slots.most_taken > self._good

    def _grow(self) -> bool:
        """Raise the limit a little after a sample in which nothing was refused, and return whether it was raised."""
        self._slots.speed_up()
        if self._slots.is_even or self._slots.most_taken + 1 < self.limit:
            return False
        self._slots.limit *= _GROWTH_PER_SAMPLE
        self._good = self.limit
        return True

    def _cut(self, part: float, now: float) -> None:
        """Lower the limit to the part that was accepted, or compare it with another one."""
        if part >= ALL:
            self._begin_block(now)
        elif self._cuts and self._comparison.may_go_upwards(part, now, seconds_per_start=self._seconds_per_start):
            self._begin_comparison(now, upwards=True)
        elif self._cuts >= _CUTS_TO_COMPARE:
            self._begin_comparison(now, upwards=False)
        else:
            self._cuts += 1
            self._lower(max(_LARGEST_CUT, 1 - part), now)

    def _lower(self, kept: float, now: float) -> None:
        """Hold a part of the limit."""
        if self._before_cuts is None:
            self._before_cuts = self.limit
        self._slots.slow_down()
        self._hold(self.limit * kept, now)

    def _end_cuts(self) -> None:
        self._cuts, self._before_cuts = 0, None

    def _return_from_cuts(self, now: float) -> None:
        """Hold the limit from before the last cuts."""
        limit = self.limit if self._before_cuts is None else self._before_cuts
        self._end_cuts()
        self._hold(limit, now)

    def _begin_block(self, now: float) -> None:
        """Hold up all starts.

        Return to the limit from before the refusals if the upstream said until when, or to a little less than that if
        a higher limit may have led to them.
        """
        is_known = self._retry_at > now
        self._block.begin(self._retry_at if is_known else inf, now)
        if is_known or self._is_raised:
            self._return_from_cuts(now)
        else:
            self._lower(_KEPT_IF_ALL_REFUSED, now)
        if self._is_raised:
            kept = self.limit * _KEPT_IF_RAISED
            self._hold(floor(kept) if kept >= 1 else kept, now)

    def _end_block(self, now: float) -> None:
        if self._block.until:
            rate = self.limit / self._slots.usual_seconds
            self._rests.on_block_over(self._block.began_at, now, raised=self._is_raised, rate=rate)
            self._is_raised = False
        self._block.end()
        self._retry_at = 0.0

    def _check_block(self, now: float) -> bool:
        """Return whether starts are held up by Retry-After, and end the block if that is over or was not meant.

        The lines that were tried meanwhile are in no sample.
        """
        if not self._block.until:
            return False
        if self._block.is_on(now) and not self._block.is_accepted(now):
            return True
        self._end_block(now)
        self._set_after = self._slots.started
        self._begin_sample(now)
        return False

    def _begin_comparison(self, now: float, *, upwards: bool) -> None:
        self._comparison.begin(upwards=upwards)
        self._compare_at(self.limit, now)

    def _compare_at(self, limit: float, now: float) -> None:
        """Take a sample at one of the two limits that are compared."""
        self._hold(limit, now)
        self._phase = _Phase.COMPARE
        self._begin_sample(
            now,
            least=self._comparison.least_starts,
            seconds=comparison.SECONDS,
            most_seconds=comparison.LONGEST_SECONDS,
        )

    def _go_on_with_comparison(self, part: float, now: float) -> None:
        """Take the second sample, or decide after it whether the refusals are about the limit."""
        if self._comparison.is_at_first_limit:
            factor = self._comparison.go_on(part)
            self._compare_at(self.limit * factor, now)
        elif self._comparison.shows_no_limit(part):
            self._parts.on_comparison(part)
            self._return_from_cuts(now)
            self._probe(_LARGEST_GROWTH, now)
        else:
            self._cuts = 0
            if self._comparison.is_upwards:
                self._slots.slow_down()
                self._comparison.rest(now)
            self._hold(self.limit * (1 - part), now)
            # The comparison has held the limit for a sample.
            self._held = True

    def _choose_spaces(self, sample: Sample) -> None:
        """Space starts evenly if those were refused that followed others too closely, and freely if that is not so."""
        evidence = sample.gap_evidence
        if sample.accepted_number is not None:
            self._slots.space_freely()
        elif evidence is not None and evidence >= _CLEAR_EVIDENCE and not self._slots.is_even:
            if self._seconds_per_start >= _SHORTEST_EVEN_SECONDS:
                self._slots.space_evenly()
        elif evidence is not None and evidence < _NO_EVIDENCE:
            self._slots.space_freely()

    def _begin_probe(self, now: float) -> None:
        """Probe a little more, or now and then, if the limit is low, whether more are accepted if they come evenly."""
        is_low = self._good < _FEW_SLOTS and self._seconds_per_start >= _SHORTEST_EVEN_SECONDS
        self._tries_even = is_low and not self._slots.is_even and self._rests.is_even_probe_due
        if self._tries_even:
            self._slots.space_evenly()
        self._probe(max(self._first_growth, _EVEN_GROWTH) if self._tries_even else self._first_growth, now)

    def _probe(self, growth: float, now: float) -> None:
        self._growth = min(_LARGEST_GROWTH, growth)
        more = self._good * (1 + self._growth)
        # A whole number more may be accepted where a fraction beyond it is not.
        is_whole = self._good >= 1 and not self._slots.is_even
        self._set_limit(max(floor(self._good + 1), more) if is_whole else more, _Phase.PROBE)
        self._begin_sample(now, least=ceil(self.limit - self._good), most_seconds=_LONGEST_PROBE_SECONDS)

    def _end_probe(self, sample: Sample, now: float) -> None:
        """Return to the limit if half of the added requests are refused; else add more, or remove the limit.

        The part that is refused at any limit is refused of the added requests too. If no more were tried, nothing is
        known about a higher limit, and even spaces, which no start had to wait for, are not needed.
        """
        part, added = sample.refused_part, 1 - self._good / self.limit
        if part >= self._parts.usual + (1 - self._parts.usual) * added / 2:
            self._choose_spaces(sample)
            self._rests.on_failed(part, tried_even=self._tries_even)
            self._is_raised = True
            if self._good <= _NEARLY * self._lowest and self._comparison.may_leave_lowest(self._parts.recent, now):
                self._compare_at(self._good * self._comparison.begin_from_lowest(self._parts.recent), now)
            else:
                self._hold(self._good, now)
            return
        self._tries_even = False
        self._rests.on_accepted()
        # If many were refused lately, few slots are taken only because those of refused requests do not count.
        if not self._holds_back(sample) and self._parts.recent <= MANY:
            self.give_up()
        elif not self._has_tried_more(sample):
            self._slots.space_freely()
            self._hold(self._good, now)
        else:
            self._end_cuts()
            self._good = self.limit
            self._parts.on_probe(part)
            self._probe((1.0 if self._rests.were_blocked else _GROWTH_OF_GROWTH) * self._growth, now)
