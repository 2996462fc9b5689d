"""Computes how long a line waits before its next attempt."""

from msgspec import Struct

_MAX_BACKOFF_SECONDS = 60.0
MAX_RETRY_AFTER_SECONDS = 300.0
_MAX_DOUBLINGS = 64


class RetryPolicy(Struct, frozen=True, kw_only=True):
    """How often a line is tried, and how long it waits in between."""

    max_attempts: int = 4
    max_throttles: int = 12
    base_seconds: float = 1.0

    def wait(self, *, tries: int, retry_after: float | None, jitter: float) -> float:
        """Return the seconds to wait: exponential backoff with full jitter, and never less than Retry-After.

        ``jitter`` is uniform in 0..1.
        """
        backoff = jitter * min(_MAX_BACKOFF_SECONDS, self.base_seconds * 2.0 ** min(tries - 1, _MAX_DOUBLINGS))
        return backoff if retry_after is None else min(retry_after, MAX_RETRY_AFTER_SECONDS) + backoff
