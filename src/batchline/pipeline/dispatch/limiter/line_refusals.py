"""Tells refusals that are about single lines from those that are about a limit.

A limit refuses lines regardless of their content. So refusals are about the lines

- if a single line is refused and no limit is known: its content may be the reason;
- if lines that were refused before are refused again and again, while most of those that are tried first pass;
- if lines are always refused when they are tried first, and pass in any order when they are tried again: a limit that
  is reached refuses many in a row, also of those that are tried again.
"""

from collections.abc import Hashable, Sequence
from itertools import pairwise
from math import inf

from batchline.pipeline.dispatch.limiter.load import Start

_TOGETHER_SECONDS = 1.0
"""If two lines are refused within this time, the refusals are not about a single line."""
_AGAIN_WEIGHT = 0.1
"""The weight of one more line that is tried again, so that about the last ten count."""
_SELDOM, _OFTEN = 0.15, 0.2
"""The parts of lines that pass seldom and often."""
_PERIOD_SECONDS, _PERIOD_LATENCIES = 0.5, 4
"""A period lasts for this time, or for so many times the latency if that is longer, so that some lines of each kind
have ended."""
_MIN_FIRST, _MIN_AGAIN = 16, 4
"""A period needs so many lines that were tried first, and so many that were tried again."""
_MAX_AGAIN = 256
"""The most lines of a period whose order is remembered."""
_MAX_LINES = 10_000
"""The number of refused lines at which they are forgotten, most of which have passed by then."""
_MIXED_PART = 0.5
"""Lines passed in any order if passed and refused ones alternated at least so often, as a part of the number of the
rarer of both."""
_UNDECIDED_SECONDS = 2.0
"""If no line passed when tried first, and too few when tried again, the period goes on for this time: each line may
need several tries."""


class LineRefusals:
    """The answers and refusals of one model, for lines that are tried first and for those that are tried again."""

    def __init__(self) -> None:
        self._refused_at = -inf
        self._refused_line: Hashable = None
        """The line that was refused last, at ``_refused_at``."""
        self._first_ends = [0, 0]
        """The numbers of lines that were tried first and refused, and of those that passed."""
        self._ends_before: dict[Hashable, list[int]] = {}
        """These numbers at the last refusal of each line that was refused."""
        self._accepted_again = 0.5
        """The part of the lines tried again that passed lately."""
        self._period_ends = 0.0
        self._first_of_period, self._again_of_period = [0, 0], [0, 0]
        """The numbers of lines of this period that were refused, and of those that passed: tried first, and again."""
        self._tried_again: list[tuple[int, bool]] = []
        """The lines of this period that were tried again: the order of their starts, and whether they passed."""
        self.first_are_refused = False
        """Whether lines tried first were refused in the last period, and lines tried again passed."""

    def on_answers(self, starts: Sequence[Start], now: float, *, again: bool) -> None:
        """Count answers to lines that were all tried first, or all tried again."""
        if not (again or self._tried_again):
            self._first_ends[True] += len(starts)
            self._first_of_period[True] += len(starts)
            return
        for start in starts:
            if again:
                self._accepted_again += _AGAIN_WEIGHT * (1 - self._accepted_again)
            self._count(now, order=start.order, again=again, accepted=True, latency_seconds=now - start.at)

    def count_refusal(self, line: Hashable, now: float, *, order: int, again: bool, limited: bool) -> bool:
        """Count a refusal, and return whether it is only about its line. ``limited`` says that a limit is known."""
        together = line != self._refused_line and now - self._refused_at <= _TOGETHER_SECONDS
        others_pass = self._note_refused(line)
        self._refused_line, self._refused_at = line, now
        self._count(now, order=order, again=again, accepted=False)
        if again:
            self._accepted_again -= _AGAIN_WEIGHT * self._accepted_again
        if self.first_are_refused or (not together and not limited):
            return True
        return again and others_pass and self._accepted_again < _SELDOM

    def _note_refused(self, line: Hashable) -> bool:
        """Note that a line was refused, and return whether most lines tried first since its last refusal passed."""
        refused, passed = self._first_ends
        refused_before, passed_before = self._ends_before.get(line, self._first_ends)
        if len(self._ends_before) >= _MAX_LINES:
            self._ends_before.clear()
        self._ends_before[line] = [refused, passed]
        return passed - passed_before > refused - refused_before

    def _count(self, now: float, *, order: int, again: bool, accepted: bool, latency_seconds: float = 0.0) -> None:
        if not again:
            self._first_ends[accepted] += 1
        if sum(self._again_of_period) >= _MIN_AGAIN and now >= self._period_ends:
            self._consider_period(now, latency_seconds)
        (self._again_of_period if again else self._first_of_period)[accepted] += 1
        if again and len(self._tried_again) < _MAX_AGAIN:
            self._tried_again.append((order, accepted))

    def _consider_period(self, now: float, latency_seconds: float) -> None:
        """End a period of which enough lines have ended, and decide what its refusals were about."""
        tried_again, passed_again = sum(self._again_of_period), self._again_of_period[True]
        if sum(self._first_of_period) < _MIN_FIRST:
            return
        first_pass, others_pass = self._first_of_period[True] > 0, passed_again > _OFTEN * tried_again
        if first_pass or others_pass or now >= self._period_ends + _UNDECIDED_SECONDS:
            self.first_are_refused = others_pass and not first_pass and self._is_mixed()
            self._first_of_period, self._again_of_period, self._tried_again = [0, 0], [0, 0], []
            self._period_ends = now + max(_PERIOD_SECONDS, _PERIOD_LATENCIES * latency_seconds)

    def _is_mixed(self) -> bool:
        """Return whether lines that were tried again passed in any order."""
        passed = [accepted for _, accepted in sorted(self._tried_again)]
        changes = sum(first is not second for first, second in pairwise(passed))
        return changes >= _MIXED_PART * min(passed.count(True), passed.count(False))
