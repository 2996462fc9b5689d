"""Counts the requests in flight to an upstream, or those of one model, without those that hang."""

from collections import deque
from collections.abc import Iterable

from msgspec import Struct

from batchline.pipeline.dispatch.limiter.rounds import Round

_SLOW_ROUNDS = 10
"""A request that is still in flight after so many times the limit were answered is slow."""


class LoadEntry(Struct, gc=False):
    """A request in flight, as one load counts it."""

    in_flight: int
    """The number of requests in flight when it started, including itself."""
    slow_after: int
    """The number of answers after which it no longer counts as in flight."""
    round: Round | None = None
    """The measurement that it is part of."""
    ended: bool = False
    slow: bool = False


class Start(Struct, gc=False):
    """A request in flight."""

    at: float
    model: str
    model_in_flight: int
    """The number of requests of its model in flight when it started, including itself and those that hang."""
    order: int
    """Its number among all requests of its model, from 1."""
    of_model: LoadEntry
    """How it counts among the requests of its model."""
    of_all: LoadEntry
    """How it counts among the requests of all models."""
    is_check: bool = False
    """Whether it started although nothing was left by what the upstream announces."""


class Load:
    """The requests in flight. Slow ones are counted apart: if they hang, they must not keep others from starting.

    While no other request is answered, none is slow.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self.slow = 0
        self._started: deque[LoadEntry] = deque()
        self._answers = 0

    def start(self, count: int, *, limit: int) -> list[LoadEntry]:
        """Add requests, and return their entries."""
        first, slow_after = self.in_flight + 1, self._answers + _SLOW_ROUNDS * limit
        entries = [LoadEntry(in_flight, slow_after) for in_flight in range(first, first + count)]
        self.in_flight += count
        self._started += entries
        return entries

    def end(self, entries: Iterable[LoadEntry], *, answered: int) -> None:
        """Remove requests that ended. ``answered`` of them were answered."""
        for entry in entries:
            entry.ended = True
            if entry.slow:
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
        self._answers += answered
