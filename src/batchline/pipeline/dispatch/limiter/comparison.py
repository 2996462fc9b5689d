"""Finds out whether refusals are about the limit, by comparing the parts that are refused at two limits.

Downwards: if the same part is refused at a much lower limit, the refusals are not about the limit. Upwards: if more are
accepted at twice the limit, a lower limit would only cost throughput. So it is with a balancer that chooses by chance
among servers of which some are full. As this provokes refusals, it is seldom done.

The lowest limit may have been reached by refusals that are not about the limit. Throughput is next to nothing there, so
it is compared with a much higher one.
"""

from math import sqrt

SECONDS, LONGEST_SECONDS = 0.25, 2.0
"""Each of the two samples takes at least the first time, so that a burst that the upstream accepts at once does not
decide. It ends after the second one if it has enough starts, so that the search goes on soon at a low limit."""
_LEAST_STARTS = 4
_LARGEST_CUT = 1 / 16
"""The least part of the limit to compare with. It may be lower than after a cut, since the comparison is over soon."""
_GROWTH, _GROWTH_FROM_LOWEST = 2.0, 16.0
"""The factors by which the limit grows upwards, and from the lowest limit. If the number that is accepted grows by the
square root of the factor, the refusals are tolerated: of twice the limit, about half of those that were added are
accepted then, as in a probe."""
_LEAST_STARTS_FROM_LOWEST = 32
_LEAST_STARTS_UPWARDS, _LONGEST_SECONDS_UPWARDS = 64, 10.0
"""The fewest starts in each sample upwards. With these, the growth that is measured is off by about 12 %. If they would
take longer than this time, there is no such comparison: a change of the upstream must be noticed by then."""
_SHORTEST_REST_SECONDS, _LONGEST_REST_SECONDS = 5.0, 80.0
"""The time after a comparison upwards in which there is no other one. It doubles with each one that shows a limit, so
that an upstream with a limit refuses few more."""
_LARGEST_PART_UPWARDS = 0.5
"""If a larger part is refused, the limit is not raised, because that would provoke still more refusals."""


class Comparison:
    """A comparison of two limits, and the rests between those upwards."""

    def __init__(self) -> None:
        self.is_upwards = False
        """Whether the second limit is the higher one."""
        self._part_before: float | None = None
        """The part that was refused at the first limit, while the sample at the second one is counted."""
        self._growth = _GROWTH
        self._next_upwards = 0.0
        self._rest_seconds = _SHORTEST_REST_SECONDS

    @property
    def is_at_first_limit(self) -> bool:
        return self._part_before is None

    @property
    def least_starts(self) -> int:
        """The fewest starts in the present sample."""
        if self._growth == _GROWTH_FROM_LOWEST:
            return _LEAST_STARTS_FROM_LOWEST
        return _LEAST_STARTS_UPWARDS if self.is_upwards else _LEAST_STARTS

    def may_go_upwards(self, part: float, now: float, *, seconds_per_start: float) -> bool:
        """Return whether a comparison upwards is due, and its starts take no longer than they may."""
        is_quick = _LEAST_STARTS_UPWARDS * seconds_per_start <= _LONGEST_SECONDS_UPWARDS
        return part < _LARGEST_PART_UPWARDS and now >= self._next_upwards and is_quick

    def may_leave_lowest(self, part: float, now: float) -> bool:
        """Return whether a comparison of the lowest limit with a much higher one is due."""
        return part < 1 - _LARGEST_CUT and now >= self._next_upwards

    def begin(self, *, upwards: bool) -> None:
        self.is_upwards, self._part_before, self._growth = upwards, None, _GROWTH

    def begin_from_lowest(self, part: float) -> float:
        """Begin at the second limit, with the part that was refused at the lowest one, and return the factor of it."""
        self.is_upwards, self._part_before, self._growth = True, part, _GROWTH_FROM_LOWEST
        return self._growth

    def go_on(self, part: float) -> float:
        """Note the part that was refused at the first limit, and return the factor of the second one."""
        self.is_upwards = self.is_upwards and part < _LARGEST_PART_UPWARDS
        self._part_before = part
        return self._growth if self.is_upwards else max(_LARGEST_CUT, min(0.5, 1 - part))

    def shows_no_limit(self, part: float) -> bool:
        """Return whether the parts that were refused at both limits show that no lower limit is better."""
        before = self._part_before
        if before is None:
            return False
        if self.is_upwards:
            return sqrt(self._growth) * (1 - part) > 1 - before
        return part > before / 2 and before < 1 - _LARGEST_CUT

    def rest(self, now: float) -> None:
        """Make no other comparison upwards for a while."""
        self._next_upwards = now + self._rest_seconds
        self._rest_seconds = min(_LONGEST_REST_SECONDS, 2 * self._rest_seconds)
