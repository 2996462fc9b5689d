"""Find the line that kills the upstream, without failing those that were in flight beside it.

When most of what is in flight breaks at once, nobody knows whose fault it was, so no attempt is spent. The suspects
are tried again apart: in groups with nothing else in flight, a group that breaks again in smaller ones, until the
guilty one is alone. A line that breaks alone spends its attempts like any other.
"""

from collections import deque
from collections.abc import Callable, Sequence

from batchline.pipeline.claim import Job

WINDOW_SECONDS = 0.25
"""Breaks within this time of the first are one event."""

_PIECES = 4
"""Two would crash the upstream twice as often to find one line; more would make the innocent wait longer."""


class Quarantine:
    def __init__(self) -> None:
        self._groups: deque[deque[Job]] = deque()
        self._group: deque[Job] = deque()
        self._running: set[Job] = set()
        self._broken: list[Job] = []
        self._in_flight_then = 0

    @property
    def occupied(self) -> bool:
        """While it is, nothing but suspects may start."""
        return bool(self._groups or self._group or self._running)

    @property
    def window_open(self) -> bool:
        """While it is, nothing may start at all."""
        return bool(self._broken)

    def broke(self, job: Job, *, in_flight: int) -> None:
        """A connection broke; ``in_flight`` counts what was, this one included."""
        if not self._broken:
            self._in_flight_then = in_flight
        self._broken.append(job)

    def close_window(self) -> tuple[list[Job], bool]:
        """The jobs that broke, and whether they broke together."""
        broken, self._broken = self._broken, []
        return broken, len(broken) > 1 and 2 * len(broken) >= self._in_flight_then

    def suspect(self, jobs: Sequence[Job]) -> None:
        """Queue jobs to be tried apart."""
        for job in jobs:
            job.suspect = True
        size = max(1, -(-len(jobs) // _PIECES))
        self._groups += (deque(jobs[at : at + size]) for at in range(0, len(jobs), size))

    def next(self, *, in_flight: int) -> Job | None:
        """The next suspect that may start: a group begins when nothing else is in flight."""
        if not self._group:
            if in_flight or not self._groups:
                return None
            self._group = self._groups.popleft()
        job = self._group.popleft()
        self._running.add(job)
        return job

    def came_back(self, job: Job) -> None:
        self._running.discard(job)

    def withdraw(self, condition: Callable[[Job], bool]) -> list[Job]:
        """Take out the queued jobs that meet a condition."""
        withdrawn = []
        for group in (self._group, *self._groups):
            taken = [job for job in group if condition(job)]
            for job in taken:
                group.remove(job)
            withdrawn += taken
        self._groups = deque(group for group in self._groups if group)
        return withdrawn
