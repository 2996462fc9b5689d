"""Counts the requests in flight to an upstream, without those that hang."""

from collections import Counter, deque

from msgspec import Struct

from batchline.pipeline.dispatch.limiter.rounds import Round

_SLOW_ROUNDS = 10
"""A request that is still in flight after so many times the limit were answered is slow."""


class Start(Struct, gc=False):
    """A request in flight."""

    at: float
    model: str
    in_flight: int
    """The number of requests in flight when it started, including itself."""
    model_in_flight: int
    """The same, of its model alone."""
    order: int
    """Its number among all requests of its model, from 1."""
    slow_after: int
    """The number of all answers after which it no longer counts as in flight."""
    round: Round | None = None
    """The measurement that it is part of."""
    is_check: bool = False
    """Whether it started although nothing was left by what the upstream announces."""
    ended: bool = False
    slow: bool = False


class Load:
    """The requests in flight. Slow ones are counted apart: if they hang, they must not keep others from starting.

    While no other request is answered, none is slow.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self.slow = 0
        self.by_model: Counter[str] = Counter()
        """The requests in flight of each model, with the slow ones."""
        self._started: deque[Start] = deque()
        self._answers = 0

    def start(self, model: str, now: float, *, order: int, limit: int) -> Start:
        self.in_flight += 1
        self.by_model[model] += 1
        start = Start(now, model, self.in_flight, self.by_model[model], order, self._answers + _SLOW_ROUNDS * limit)
        self._started.append(start)
        return start

    def end(self, start: Start) -> None:
        start.ended = True
        if self.by_model[start.model] > 1:
            self.by_model[start.model] -= 1
        else:
            del self.by_model[start.model]
        if start.slow:
            self.slow -= 1
        else:
            self.in_flight -= 1
        started = self._started
        while started and ((first := started[0]).ended or first.slow_after < self._answers):
            started.popleft()
            if not first.ended:
                first.slow = True
                self.slow += 1
                self.in_flight -= 1

    def on_answer(self) -> None:
        self._answers += 1
