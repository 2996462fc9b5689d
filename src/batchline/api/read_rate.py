"""Limits the reads per second of each key, so that a client that polls in a loop does not slow the others down."""

import math
from typing import Any

from starlette.requests import Request

from batchline.api.auth import Auth
from batchline.domain.errors import RateLimited
from batchline.domain.records import Owner
from batchline.ports import Clock

_BURST_SECONDS = 2.0
"""A key that was idle may make the reads of so many seconds at once."""
_ROUNDING_SECONDS = 1e-6
"""A wait that is not longer is a rounding error of the sums of times, and refuses nothing."""
_MAX_KEYS = 10_000
"""Above this number of keys, those whose bucket is full are forgotten, which bounds the memory."""
_READS = frozenset({"GET", "HEAD"})


class ReadRate:
    """Limits the reads of every key with a token bucket, which refills at the allowed rate."""

    def __init__(self, per_second: float, *, clock: Clock) -> None:
        self._per_second, self._clock = per_second, clock
        self._full_at: dict[str, float] = {}
        """The time at which the bucket of each key would be full again without further reads."""

    def take(self, key_id: str) -> None:
        """Count a read. Raise RateLimited if the key has made too many."""
        now = self._clock.steady()
        full_at = max(self._full_at.get(key_id, now), now) + 1 / self._per_second
        wait = full_at - now - _BURST_SECONDS
        if wait > _ROUNDING_SECONDS:
            raise RateLimited(
                f"This key makes more than {self._per_second:g} reads per second. Try again shortly.",
                retry_after=max(1, math.ceil(wait)),
                bound="key_reads",
            )
        self._full_at[key_id] = full_at
        if len(self._full_at) > _MAX_KEYS:
            self._full_at = {key: at for key, at in self._full_at.items() if at > now}


class ReadLimitedAuth(Auth):
    """Authenticates requests, and refuses reads of a key that makes too many."""

    def __init__(self, *, reads: ReadRate, **options: Any) -> None:
        super().__init__(**options)
        self._reads = reads

    async def owner(self, request: Request) -> Owner:
        owner = await super().owner(request)
        if request.method in _READS:
            self._reads.take(owner.key_id)
        return owner
