"""Computes how long a line waits before its next attempt."""

from msgspec import Struct

_MAX_BACKOFF_SECONDS = 60.0
MAX_RETRY_AFTER_SECONDS = 300.0
_MAX_DOUBLINGS = 64
_LIMITED_TRIES, _MAX_LIMITED_DOUBLINGS = 6, 3
"""At an upstream with a limit, so many waits are half as long as the first one otherwise. Then they double, so often at
most."""
_YIELDING_PART, _LONGEST_YIELD_SECONDS = 1 / 3, MAX_RETRY_AFTER_SECONDS
"""At an upstream with a limit, a line that has spent more than this part of its throttles starts after the other lines
of its model, but waits no longer for them than this time before each attempt."""
_JITTER_AFTER_RETRY_AFTER = 0.25
"""At an upstream with a limit, lines need not be spread far after the time of Retry-After: the limiter spaces them."""


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """The number of attempts of a line, and the waits between them."""

    max_attempts: int = 4
    max_throttles: int = 12
    base_seconds: float = 1.0

    def wait(self, *, tries: int, retry_after: float | None, jitter: float, limited: bool = False) -> float:
        """Return the seconds to wait: exponential backoff with full jitter, and never less than Retry-After.

        ``jitter`` is uniform in 0..1. ``limited`` says that the upstream refuses what exceeds a known limit. Then fewer
        lines are started, and the refused ones need not stay away longer and longer.
        """
        doublings = min(tries - 1, _MAX_DOUBLINGS)
        if limited:
            doublings = min(max(-1, tries - _LIMITED_TRIES - 1), _MAX_LIMITED_DOUBLINGS)
        backoff = jitter * min(_MAX_BACKOFF_SECONDS, self.base_seconds * 2.0**doublings)
        if limited and retry_after is not None:
            backoff *= _JITTER_AFTER_RETRY_AFTER
        return backoff if retry_after is None else min(retry_after, MAX_RETRY_AFTER_SECONDS) + backoff

    def yield_seconds(self, throttles: float) -> float:
        """Return how long a line lets others start before it, after so many throttles at an upstream with a limit.

        A limit of tokens may leave room for small lines again and again, and never for a large one beside them.
        """
        return _LONGEST_YIELD_SECONDS if throttles > _YIELDING_PART * self.max_throttles else 0.0
