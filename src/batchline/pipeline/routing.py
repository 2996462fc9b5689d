"""Calls that somebody waits for: which upstream takes the next one, and how many slots they take from batches."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from batchline.ports import Clock

_EJECTED_SECONDS = 10.0
"""How long an upstream that failed a call is spared where there are others."""


class SyncRouter:
    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._calls: Counter[str] = Counter()
        self._failed_at: dict[str, float] = {}
        self._watchers: dict[str, Callable[[], None]] = {}

    def calls(self, upstream: str) -> int:
        return self._calls[upstream]

    def watch(self, upstream: str, on_call_ended: Callable[[], None]) -> None:
        """``freed`` hears of every call that ended."""
        self._watchers[upstream] = on_call_ended

    def choose(self, upstreams: Sequence[str]) -> str:
        """The least busy one, rather none that failed lately."""
        now = self._clock.steady()

        def trouble(name: str) -> tuple[bool, int]:
            return now - self._failed_at.get(name, -math.inf) < _EJECTED_SECONDS, self._calls[name]

        return min(upstreams, key=trouble)

    def failed(self, upstream: str) -> None:
        self._failed_at[upstream] = self._clock.steady()

    @contextmanager
    def call(self, upstream: str) -> Iterator[None]:
        self._calls[upstream] += 1
        try:
            yield
        finally:
            self._calls[upstream] -= 1
            if (on_call_ended := self._watchers.get(upstream)) is not None:
                on_call_ended()
