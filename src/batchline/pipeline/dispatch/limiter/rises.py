"""Notices that the limits in the headers of an upstream are those of several servers, each of which counts for itself.

What is left falls until the reset, or grows as fast as a bucket fills. Behind a balancer the answers of several servers
alternate, so what is left seems to rise again and again. None of the numbers says how much the upstream still accepts::

    remaining ──╲ ╱─╲ ╱──╲ ╱──     480, 20, 470, 18, 455: two servers
                 V   V    V
"""

from math import inf

_MOST = 4
"""The numbers are those of several servers if they rise so often before the reset that was announced at the first rise.
A single rise may be a reset that came early."""
_CHANCE_PART = 0.1
"""A rise by less than this part of the limit says nothing: some upstreams give back tokens that a request did not use,
and answers overtake each other."""


class Rises:
    """The rises of one announced number."""

    def __init__(self) -> None:
        self._remaining, self._refill, self._at = inf, 0.0, 0.0
        """The number that the last answer announced, what a bucket gains in a second, and the time of that answer."""
        self._reset_at = 0.0
        self._count, self._until = 0, 0.0
        """The number of rises that count, and the time until which further ones are added to them."""

    def add(self, remaining: float, *, limit: float, reset_seconds: float, unseen: float, now: float) -> bool:
        """Count an announcement, and return whether it is one rise too many.

        ``unseen`` is what requests may have used that the answer did not know of.
        """
        refilled = self._refill * (now - self._at)
        rise = remaining - self._remaining - refilled - unseen
        if rise > _CHANCE_PART * limit and now < self._reset_at:
            if now >= self._until:
                self._count, self._until = 0, self._reset_at
            self._count += 1
        self._remaining, self._at, self._reset_at = remaining, now, now + reset_seconds
        self._refill = max(0.0, limit - remaining) / reset_seconds if reset_seconds > 0 else inf
        return self._count >= _MOST
