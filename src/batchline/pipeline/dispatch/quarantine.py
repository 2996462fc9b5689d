"""Finds the line that crashes the upstream, without failing those that were in flight beside it.

When most of what is in flight breaks at once, the cause is unknown, so no attempt is spent. The suspects are tried
again in groups; a group that breaks again is tried in smaller ones, until the cause is alone. A line that breaks alone
spends its attempts like any other.

Breaks are not always a crash: a server or a proxy may close the connections of some lines and go on answering all
others. So what runs beside the suspects depends on what is known of the upstream::

    unknown ──(eight connections outlast the breaks, or another line is answered after them)──> alive
    unknown, alive ──(it refuses a connection)──> crashes
    alive          ──(everything in flight breaks, and not only what broke before)──> crashes
    crashes        ──(ten minutes without either)──> unknown

If the upstream is alive, other lines run while suspects are tried, but none of a project in the moment in which half of
what is in flight breaks for the first time. Otherwise suspects run with nothing else in flight. Lines that break while
eight others outlast them are the cause of their own breaks and never suspects again, unless at least half of what is in
flight breaks and some of it for the first time.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from math import inf
from typing import NamedTuple

from batchline.pipeline.job import Job

WINDOW_SECONDS = 0.25
"""Breaks within this time of the first are one event."""

_BUFFERED_SECONDS = 0.1
"""An answer that is read within this time of the first break may have been sent before it."""

_GROUPS = 4
"""The number of groups that the suspects of a crash are split into. Two would need twice as many crashes to find one
line; more would make the other lines wait longer."""

_SURVIVORS = 8
"""The number of lines that must outlast a break before it is no crash. If one of two servers behind an address crashes,
the chance that it had none of eight lines is 1 in 256."""

_CRASH_PART = 0.9
"""An upstream that was alive has crashed if so many of the lines in flight broke. A few answers may be read after the
breaks although they were sent before."""

_CRASH_MEMORY_SECONDS = 600.0
"""For this time after a crash, lines that are answered do not show that the next breaks are none: a server may restart
within a second."""


class BreakVerdict(NamedTuple):
    """Tells crashes from the faults of single lines, for the breaks of one window."""

    own: list[Job]
    """The jobs that each spend an attempt."""
    suspects: list[Job]
    """The jobs of which one may have crashed the upstream."""
    crashed: bool
    """Whether the upstream may be down."""
    survived: bool
    """Whether many other connections outlasted the breaks."""


class Quarantine:
    """The jobs that may have crashed the upstream, and the window in which breaks are counted as one event."""

    def __init__(self) -> None:
        self._groups: deque[deque[Job]] = deque()
        self._group: deque[Job] = deque()
        self._running: set[Job] = set()
        self._at_risk: set[Job] = set()
        """The jobs in flight at the first break of the window."""
        self._opened_at = 0.0
        self._broken: list[Job] = []
        self._broken_again: set[Job] = set()
        """Those of the broken jobs that broke in an earlier window too."""
        self._broken_later: list[Job] = []
        """Jobs that were sent after the first break of the window and broke too. Each spent an attempt at once."""
        self._answered = 0
        """The number of other jobs that were answered within the window, and after its first break."""
        self.alive = False
        """Whether the upstream outlasted the last breaks. Then other jobs run while suspects are tried."""
        self._crashed_at = -inf

    def __len__(self) -> int:
        """Return the number of suspects that wait to be tried."""
        return len(self._group) + sum(map(len, self._groups))

    @property
    def by_batch(self) -> Counter[str]:
        """The number of suspects of each batch that wait to be tried."""
        return Counter(job.batch.id for group in (self._group, *self._groups) for job in group)

    @property
    def occupied(self) -> bool:
        """Whether there are suspects."""
        return bool(self._groups or self._group or self._running)

    @property
    def is_trying(self) -> bool:
        """Whether suspects are in flight. Some may have turned out to break by themselves since they were queued."""
        return bool(self._running)

    @property
    def holds_all(self) -> bool:
        """Whether only suspects may start."""
        return self.occupied and not self.alive

    @property
    def awaits_answers(self) -> bool:
        """Whether an answer may show that the upstream has outlasted breaks."""
        return self.window_open or self.holds_all

    @property
    def window_open(self) -> bool:
        return bool(self._at_risk)

    @property
    def crash_seen(self) -> bool:
        """Whether so many lines have broken that the upstream may be down. Then nothing may start."""
        return self._broke_together and not self.alive

    @property
    def held_projects(self) -> frozenset[str]:
        """The projects whose lines may not start because so many of them have just broken for the first time."""
        if not self._broke_together or self._broke_only_again:
            return frozenset()
        return frozenset(job.batch.project_id for job in self._broken)

    @property
    def _broke_together(self) -> bool:
        """Whether at least half of the lines in flight at the first break have broken.

        Lines sent later do not count, or a fast upstream that drops one in a hundred would look like a crash.
        """
        return len(self._broken) > 1 and 2 * len(self._broken) >= len(self._at_risk)

    @property
    def _broke_only_again(self) -> bool:
        """Whether all lines that have broken broke in an earlier window too."""
        return len(self._broken_again) == len(self._broken)

    def note_break(self, job: Job, now: float, *, beside: Collection[Job]) -> bool:
        """Note a broken connection, and return whether the decision must wait for the end of the window."""
        broke_before, job.broke = job.broke, True
        if not self._at_risk and beside:
            self._at_risk, self._opened_at = {job, *beside}, now
        if job not in self._at_risk:
            if self._at_risk:
                self._broken_later.append(job)
            return False
        self._broken.append(job)
        if broke_before:
            self._broken_again.add(job)
        return True

    def on_answer(self, job: Job, now: float) -> None:
        """Note an answer to a job. If it is no suspect and was answered after breaks, the upstream outlasted them."""
        if job.suspect:
            return
        if self.window_open:
            self._answered += job not in self._at_risk or now - self._opened_at >= _BUFFERED_SECONDS
        elif self.occupied:
            self._note_alive(now)

    def on_refused(self, now: float) -> None:
        """Note that the upstream refused a connection, as it does while it restarts."""
        self._note_crash(now)

    def close_window(self, now: float, *, in_flight: Collection[Job]) -> BreakVerdict:
        """End the window, and return what its breaks were. ``in_flight`` are the jobs whose connections stand."""
        broken, together = self._broken, self._broke_together
        survivors = self._answered + sum(job in in_flight for job in self._at_risk)
        survived = survivors >= _SURVIVORS
        only_again = self._broke_only_again
        if survived:
            self._note_alive(now)
            _mark(self._broken_later)
        elif self.alive and not survivors and not only_again and len(broken) >= _CRASH_PART * len(self._at_risk):
            self._note_crash(now)
        self._at_risk, self._broken, self._broken_again = set(), [], set()
        self._broken_later, self._answered = [], 0
        if survived and (only_again or not together):
            _mark(broken)
        suspects = [job for job in broken if not job.breaks_alone] if together else []
        own = [job for job in broken if job.breaks_alone] if together else broken
        return BreakVerdict(own, suspects, crashed=bool(suspects) and not self.alive, survived=survived)

    def _note_alive(self, now: float) -> None:
        self.alive = now - self._crashed_at >= _CRASH_MEMORY_SECONDS

    def _note_crash(self, now: float) -> None:
        self.alive, self._crashed_at = False, now

    def suspect(self, jobs: Sequence[Job]) -> None:
        """Queue jobs to be tried apart."""
        for job in jobs:
            job.suspect = True
        size = max(1, -(-len(jobs) // _GROUPS))
        self._groups += (deque(jobs[at : at + size]) for at in range(0, len(jobs), size))

    def start_next(self, *, in_flight: int) -> Job | None:
        """Take the next suspect that may start.

        A group starts when no other suspect is in flight, and nothing else either unless the upstream is alive.
        """
        if self.window_open:
            return None
        if not self._group:
            if (in_flight and not self.alive) or self._running or not self._groups:
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


def _mark(jobs: list[Job]) -> None:
    """Mark jobs as the cause of their own breaks."""
    for job in jobs:
        job.suspect, job.breaks_alone = False, True
