"""Virtual time and seeded randomness: a run follows from its seed alone, and never waits."""

import random
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class World:
    """What is to happen when. It serves as the clock and the randomness of the code that runs in it."""

    def __init__(self, seed: int) -> None:
        self.time = 0.0
        self.random = random.Random(seed)
        self.bytes, self.uniform = self.random.randbytes, self.random.uniform
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()

    def now(self) -> float:
        return self.time

    def steady(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError("nothing waits in virtual time: use after()")

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        """Call something after so many seconds."""
        heappush(self._events, (self.time + seconds, next(self._order), call))

    def run_until(self, condition: Callable[[], bool], *, limit_seconds: float) -> None:
        """Let time go on until a condition is met, or for so many seconds."""
        end = self.time + limit_seconds
        while not condition():
            if not self._events or self._events[0][0] > end:
                self.time = end
                return
            self.time, _, call = heappop(self._events)
            call()
