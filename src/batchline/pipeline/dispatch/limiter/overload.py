"""Tells from timeouts and 408, 502, 503, 504 and 529 whether an upstream has too much to do.

::

    fine ──(a quarter of a group are overloads)──> half the limit ──(the next group: few)──> fine
      ^                                                  │
      └──(the next group, or a later one: about as many; the limit is again what it was)

If the load is the cause, about as many requests as before are answered at half the limit, so their part in a group is
twice as large. If it is not, the part is the same.

A group is a number of requests that started one after another, and it is judged when nearly all of them have ended. An
overload may take much longer than an answer, for example until a timeout. Of the first requests to end it would be too
small a part, and the cut would seem to have helped.
"""

from collections.abc import Sequence
from math import sqrt

from batchline.pipeline.dispatch.limiter.load import Start

_OVERLOADED_PART = 0.25
"""If this part of a group ended with an overload, the upstream may have too much to do."""
_LEAST_GROUP, _GROUP_PART = 32, 2
"""The requests of a group: the first number, or so many times the limit if that is more."""
_ENDED_PART = 0.95
"""The part of a group that must have ended. The others may hang."""
_ERRORS = 2.0
"""The limit is cut if there are more overloads than usual by so many standard errors."""
_CLEAR_PART = 0.25
"""If this part of the overloads is left, it is clear that the cut has helped. Else as many may come back, and then the
few between were chance."""
_NEW_PART = 0.3
"""The weight of the last group in what is usual."""


class _Group:
    """Requests that started one after another: the overloads among those that have ended."""

    def __init__(self, *, after: int, size: int) -> None:
        self._after, self.size = after, size
        self._ends = self._overloads = 0

    def on_end(self, starts: Sequence[Start], *, overloaded: bool) -> None:
        ends = sum([self._after < start.order <= self._after + self.size for start in starts])
        self._ends += ends
        self._overloads += ends if overloaded else 0

    @property
    def is_complete(self) -> bool:
        return self._ends >= _ENDED_PART * self.size

    @property
    def overloaded_part(self) -> float:
        return self._overloads / self._ends


class Overload:
    """Judges one group of requests of a model after another."""

    def __init__(self) -> None:
        self._group = _Group(after=0, size=_LEAST_GROUP)
        self._part_before, self._limit_before = 0.0, 0
        """The part of overloads that led to the last cut, and the limit before it; 0 if there is none to return to."""
        self._is_new_cut = False
        """Whether no group has been judged since the last cut."""
        self._usual = 0.0
        """The part of overloads that no cut changed."""

    def on_end(self, starts: Sequence[Start], *, overloaded: bool, limit: int, started: int) -> int | None:
        """Count the ends of requests, and return the limit to set, if it is to be changed.

        ``started`` is the number of requests of the model that were started in all.
        """
        self._group.on_end(starts, overloaded=overloaded)
        if not self._group.is_complete:
            return None
        changed = self._judge(self._group, limit)
        size = max(_LEAST_GROUP, _GROUP_PART * (limit if changed is None else changed))
        self._group = _Group(after=started, size=size)
        return changed

    def _judge(self, group: _Group, limit: int) -> int | None:
        """Return the limit to set after a group: that before a cut that has not helped, half of it, or None.

        The first group after a cut may seem to show by chance that it helped. So later groups with too many overloads
        are compared with those before the cut too, until it is clear.
        """
        part, is_new_cut = group.overloaded_part, self._is_new_cut
        self._is_new_cut = False
        too_many = self._are_too_many(part, group.size)
        if self._limit_before and (is_new_cut or too_many) and not self._has_helped(part):
            self._usual, before, self._limit_before = part, self._limit_before, 0
            return max(limit, before)
        if too_many and not is_new_cut:
            self._part_before, self._limit_before, self._is_new_cut = part, limit, True
            return max(1, limit // 2)
        if part < _CLEAR_PART * self._part_before:
            self._limit_before = 0
        if self._usual:
            self._usual += _NEW_PART * (part - self._usual)
        return None

    def _are_too_many(self, part: float, size: int) -> bool:
        return part >= _OVERLOADED_PART and part > self._usual + _ERRORS * sqrt(self._usual * (1 - self._usual) / size)

    def _has_helped(self, part: float) -> bool:
        """Return whether the last cut has made the part of the requests that are answered about twice as large."""
        answered, before = 1 - part, 1 - self._part_before
        return answered > (before + min(1.0, 2 * before)) / 2
