"""Finds the line that crashes the upstream, without failing those that were in flight beside it.

When most of what is in flight breaks at once, the cause is unknown, so no attempt is spent. The suspects are tried
again in groups with nothing else in flight; a group that breaks again is tried in smaller ones, until the cause is
alone. A line that breaks alone spends its attempts like any other.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence

from batchline.pipeline.job import Job

WINDOW_SECONDS = 0.25
"""Breaks within this time of the first are one event."""

_GROUPS = 4
"""The number of groups that the suspects of a crash are split into. Two would need twice as many crashes to find one
line; more would make the other lines wait longer."""


class Quarantine:
    """The jobs that may have crashed the upstream, and the window in which breaks are counted as one event."""

    def __init__(self) -> None:
        self._groups: deque[deque[Job]] = deque()
        self._group: deque[Job] = deque()
        self._running: set[Job] = set()
        self._at_risk: set[Job] = set()
        self._broken: list[Job] = []

    def __len__(self) -> int:
        """Return the number of suspects that wait to be tried."""
        return len(self._group) + sum(map(len, self._groups))

    @property
    def occupied(self) -> bool:
        """Whether there are suspects. While there are, nothing else may start."""
        return bool(self._groups or self._group or self._running)

    @property
    def window_open(self) -> bool:
        return bool(self._at_risk)

    @property
    def crash_seen(self) -> bool:
        """Whether at least half of the lines in flight at the first break have broken. Then nothing may start.

        Lines sent later do not count, or a fast upstream that drops one in a hundred would look like a crash.
        """
        return len(self._broken) > 1 and 2 * len(self._broken) >= len(self._at_risk)

    def note_break(self, job: Job, *, beside: Collection[Job]) -> bool:
        """Note a broken connection, and return whether the decision must wait for the end of the window."""
        if not self._at_risk and beside:
            self._at_risk = {job, *beside}
        if job not in self._at_risk:
            return False
        self._broken.append(job)
        return True

    def close_window(self) -> tuple[list[Job], bool]:
        """End the window, and return the jobs that broke and whether they broke together."""
        broken, together = self._broken, self.crash_seen
        self._at_risk, self._broken = set(), []
        return broken, together

    def suspect(self, jobs: Sequence[Job]) -> None:
        """Queue jobs to be tried with nothing else in flight."""
        for job in jobs:
            job.suspect = True
        size = max(1, -(-len(jobs) // _GROUPS))
        self._groups += (deque(jobs[at : at + size]) for at in range(0, len(jobs), size))

    def start_next(self, *, in_flight: int) -> Job | None:
        """Take the next suspect that may start. A group starts when nothing else is in flight."""
        if not self._group:
            if in_flight or self._running or not self._groups:
                return None
            self._group = self._groups.popleft()
        job = self._group.popleft()
        self._running.add(job)
        return job

    def finish(self, job: Job) -> None:
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
