"""How long a line waits before it is tried again."""

from msgspec import Struct

_LONGEST_BACKOFF = 60.0
_LONGEST_RETRY_AFTER = 300.0
_MOST_DOUBLINGS = 64


class RetryPolicy(Struct, frozen=True, kw_only=True):
    max_attempts: int = 4
    max_throttles: int = 12
    base_seconds: float = 1.0

    def wait(self, *, tries: int, retry_after: float | None, jitter: float) -> float:
        """Exponential backoff with full jitter (``jitter`` is uniform in 0..1), and never before Retry-After."""
        backoff = jitter * min(_LONGEST_BACKOFF, self.base_seconds * 2.0 ** min(tries - 1, _MOST_DOUBLINGS))
        return backoff if retry_after is None else min(retry_after, _LONGEST_RETRY_AFTER) + backoff
