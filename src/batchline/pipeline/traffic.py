"""Calls that somebody waits for: which upstream takes the next one, and how many slots they take from batches."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from batchline.ports import Clock

_EJECTED_SECONDS = 10.0
"""How long an upstream that failed a call is spared where there are others."""


class Traffic:
    def __init__(self, *, clock: Clock) -> None:
        self._clock = clock
        self._live: Counter[str] = Counter()
        self._failed_at: dict[str, float] = {}
        self._watchers: dict[str, Callable[[], None]] = {}

    def live(self, upstream: str) -> int:
        return self._live[upstream]

    def watch(self, upstream: str, freed: Callable[[], None]) -> None:
        """``freed`` hears of every call that ended."""
        self._watchers[upstream] = freed

    def choose(self, upstreams: Sequence[str]) -> str:
        """The least busy one, rather none that failed lately."""
        now = self._clock.steady()

        def trouble(name: str) -> tuple[bool, int]:
            return now - self._failed_at.get(name, -math.inf) < _EJECTED_SECONDS, self._live[name]

        return min(upstreams, key=trouble)

    def failed(self, upstream: str) -> None:
        self._failed_at[upstream] = self._clock.steady()

    @contextmanager
    def call(self, upstream: str) -> Iterator[None]:
        self._live[upstream] += 1
        try:
            yield
        finally:
            self._live[upstream] -= 1
            if (freed := self._watchers.get(upstream)) is not None:
                freed()
