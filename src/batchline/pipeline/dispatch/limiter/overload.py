"""Tells from timeouts and 408, 502, 503 and 504 whether an upstream has too much to do.

::

    fine ──(a quarter of the last ends are overloads)──> half the limit ──┬─(fewer overloads)──> fine
                                                                          └─(as many)──> the limit before the cut
"""

from collections.abc import Sequence

from batchline.pipeline.dispatch.limiter.load import Start

_OVERLOADED_PART = 0.25
"""If this part of the last requests ended with an overload, the upstream has too much to do."""
_MIN_ENDS = 16
_SAME_PART = 0.7
"""If at half the limit this part of the overloads is left, the load is not their cause."""
_TOLERANCE = 1.3


class Overload:
    """Counts overloads among the ends of requests, in groups of about as many as may be in flight."""

    def __init__(self) -> None:
        self._ends = self._overloads = 0
        self._since = 0.0
        self._part_before: float | None = None
        """The part of overloads that led to the last cut, until it is known whether the cut helped."""
        self._limit_before = 0
        self._tolerated = 0.0

    def on_end(self, starts: Sequence[Start], now: float, *, overloaded: bool, limit: int) -> int | None:
        """Count the ends of requests, and return the limit to set, if it is to be changed."""
        ends = sum([start.at >= self._since for start in starts]) if self._since else len(starts)
        if not ends:
            return None
        self._ends += ends
        self._overloads += ends if overloaded else 0
        if self._ends < _MIN_ENDS or self._ends < limit:
            return None
        part = self._overloads / self._ends
        self._ends = self._overloads = 0
        if self._part_before is None:
            return self._cut(part, limit, now)
        helped, self._part_before = part < _SAME_PART * self._part_before, None
        if helped:
            return None
        self._tolerated, self._since = _TOLERANCE * part, now
        return max(limit, self._limit_before)

    def _cut(self, part: float, limit: int, now: float) -> int | None:
        if part < _OVERLOADED_PART or part <= self._tolerated:
            self._tolerated = min(self._tolerated, _TOLERANCE * part) if part else 0.0
            return None
        self._part_before, self._limit_before, self._since = part, limit, now
        return max(1, limit // 2)
