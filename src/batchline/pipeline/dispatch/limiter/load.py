"""Counts the requests in flight to an upstream, or those of one model, without those that hang."""

from collections import deque
from collections.abc import Iterable

from msgspec import Struct

from batchline.pipeline.dispatch.limiter.rounds import Round

_SLOW_ROUNDS = 10
"""A request that is still in flight after so many times the limit were answered is slow."""


class LoadGroup(Struct, gc=False):
    """Requests that started together, as one load counts them."""

    in_flight: int
    """The number of them that have not ended."""
    slow_after: int
    """The number of answers after which those in flight are slow."""
    slow: bool = False


class Start(Struct, gc=False):
    """A request in flight. It counts among the requests of its model, and among those of all models."""

    at: float
    model: str
    order: int
    """Its number among all requests of its model, from 1."""
    in_flight_with_slow: int
    """The number of requests of its model in flight when it started, including itself and those that hang."""
    in_flight: int
    """The number of requests of its model in flight when it started, including itself, without those that hang."""
    in_flight_of_all: int
    """The same number of the requests of all models, or of those that share a limit with its model."""
    group: LoadGroup
    group_of_all: LoadGroup
    is_check: bool = False
    """Whether it started although nothing was left by what the upstream announces."""
    round: Round | None = None
    """The measurement of its model that it is part of."""
    round_of_all: Round | None = None
    """The measurement of the models that share a limit that it is part of."""


class Load:
    """The requests in flight. Slow ones are counted apart: if they hang, they must not keep others from starting.

    While no other request is answered, none is slow.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self.slow = 0
        self._started: deque[LoadGroup] = deque()
        self._answers = 0

    def start(self, count: int, *, limit: int) -> LoadGroup:
        """Add requests that start together, and return their group."""
        group = LoadGroup(count, self._answers + _SLOW_ROUNDS * limit)
        self.in_flight += count
        self._started.append(group)
        return group

    def end(self, groups: Iterable[LoadGroup], *, answered: int) -> None:
        """Remove requests that ended, given the group of each. ``answered`` of them were answered."""
        for group in groups:
            group.in_flight -= 1
            if group.slow:
                self.slow -= 1
            else:
                self.in_flight -= 1
        started = self._started
        while started and (not (first := started[0]).in_flight or first.slow_after < self._answers):
            started.popleft()
            first.slow = True
            self.slow += first.in_flight
            self.in_flight -= first.in_flight
        self._answers += answered
