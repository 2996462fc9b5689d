"""Tells refusals that are about single lines from those that are about a limit.

A limit refuses lines without regard to which they are. So it is about the lines

- if a single line is refused: it may be for what it contains;
- if lines that were refused before are refused again and again, while others pass;
- if lines are always refused when they are tried first, and pass when they are tried again.
"""

from collections.abc import Hashable
from math import inf

_TOGETHER_SECONDS = 1.0
"""If two lines are refused within this time, it is not about a single line."""
_AGAIN_WEIGHT = 0.1
"""The weight of one more line that is tried again: about ten of them decide."""
_SELDOM, _OFTEN = 0.15, 0.2
"""The parts of lines that pass seldom and often."""
_PERIOD_SECONDS, _PERIOD_LATENCIES = 0.5, 4
"""A period lasts for this time, or for so many answers after each other: some of each kind must have ended."""
_MIN_FIRST, _MIN_AGAIN = 16, 4
"""A period shows something with so many lines that were tried first, and so many that were tried again."""
_UNDECIDED_SECONDS = 2.0
"""If none was accepted, neither first nor often enough again, the period goes on for this time: the lines may need
several tries each."""


class LineRefusals:
    """The answers and refusals of one model, for lines that are tried first and for those that are tried again."""

    def __init__(self) -> None:
        self._refused_at = -inf
        self._refused_line: Hashable = None
        """The line that was refused last, and when."""
        self._others_pass = False
        """Whether anything was answered since then."""
        self._accepted_again = 0.5
        """The part of the lines tried again that passed lately."""
        self._period_ends = 0.0
        self._counts = dict.fromkeys([(again, accepted) for again in (False, True) for accepted in (False, True)], 0)
        """The lines of this period, by whether they were tried again and whether they passed."""
        self.first_are_refused = False
        """Whether lines tried first were refused in the last period, and lines tried again passed."""

    def on_answer(self, now: float, *, again: bool, latency_seconds: float) -> None:
        self._others_pass = True
        if again:
            self._accepted_again += _AGAIN_WEIGHT * (1 - self._accepted_again)
        self._count(now, again=again, accepted=True, latency_seconds=latency_seconds)

    def is_about_line(self, line: Hashable, now: float, *, again: bool) -> bool:
        """Count a refusal, and return whether it is about its line alone."""
        together = line != self._refused_line and now - self._refused_at <= _TOGETHER_SECONDS
        others_pass, self._others_pass = self._others_pass, False
        self._refused_line, self._refused_at = line, now
        self._count(now, again=again, accepted=False)
        if again:
            self._accepted_again -= _AGAIN_WEIGHT * self._accepted_again
        if not together or self.first_are_refused:
            return True
        return again and others_pass and self._accepted_again < _SELDOM

    def _count(self, now: float, *, again: bool, accepted: bool, latency_seconds: float = 0.0) -> None:
        counts = self._counts
        first, tried_again = counts[False, True] + counts[False, False], counts[True, True] + counts[True, False]
        if now >= self._period_ends and first >= _MIN_FIRST and tried_again >= _MIN_AGAIN:
            first_pass, others_pass = counts[False, True] > 0, counts[True, True] > _OFTEN * tried_again
            if first_pass or others_pass or now >= self._period_ends + _UNDECIDED_SECONDS:
                self.first_are_refused = others_pass and not first_pass
                self._counts = counts = dict.fromkeys(counts, 0)
                self._period_ends = now + max(_PERIOD_SECONDS, _PERIOD_LATENCIES * latency_seconds)
        counts[again, accepted] += 1
