"""Lines in flight to one upstream: how many may be, and how many of them one project's."""

import math
from collections import Counter
from collections.abc import Callable, Iterator

from batchline.domain.outcomes import Outcome, Setback
from batchline.domain.replies import FaultKind
from batchline.pipeline.claim import Job
from batchline.pipeline.limiter import Limiter, Sign, Start
from batchline.ports import Clock

_QUICK_SECONDS = 0.5
"""Slots with quicker answers than this are free again before anybody minds."""
_SHORTEST_SECONDS = 0.001
_FEW_SLOTS = 8
_MEMORY = 0.1
_OVERLOADS = frozenset({"http_502", "http_503", "http_504", FaultKind.TIMEOUT})


class InFlight:
    def __init__(self, limiter: Limiter, *, clock: Clock, live: Callable[[], int]) -> None:
        """``live`` tells how many slots are taken by calls that somebody waits for."""
        self._limiter, self._clock = limiter, clock
        self._count_live = live
        self._starts: dict[Job, Start] = {}
        self._typical_seconds = math.inf
        self.by_project: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._starts)

    def __contains__(self, job: object) -> bool:
        return job in self._starts

    def __iter__(self) -> Iterator[Job]:
        return iter(self._starts)

    @property
    def slots(self) -> int:
        return self._limiter.limit

    @property
    def rate(self) -> float | None:
        return self._limiter.rate

    @property
    def live(self) -> int:
        return self._count_live()

    @property
    def room(self) -> int:
        """How many more may be, whatever the pace. Whoever is waited for goes before batches, but never stops them."""
        live = self._count_live()
        return self._limiter.room(beside=max(0, min(live, self.slots - 1)) if live else 0)

    def wait(self) -> float:
        """Seconds until the pace lets the next one start."""
        return self._limiter.wait(self._clock.steady())

    def within(self, seconds: float) -> int:
        """How many will land in that time, by how long they took lately."""
        return int(self.slots * seconds / max(self._typical_seconds, _SHORTEST_SECONDS))

    @property
    def most_of_one(self) -> int:
        """Slots that one project may take. While answers are slow it leaves one, so that others need not wait for it:
        lines that hang must not keep another project's from starting."""
        slow = self._typical_seconds > _QUICK_SECONDS and self.slots >= _FEW_SLOTS
        return self._limiter.most - slow

    def allow(self, most: int) -> None:
        self._limiter.allow(most)

    def add(self, jobs: list[Job]) -> None:
        self._starts.update(zip(jobs, self._limiter.started(self._clock.steady(), len(jobs)), strict=True))
        for job in jobs:
            self.by_project[job.batch.project_id] += 1

    def land(self, job: Job, outcome: Outcome | None, now: float) -> float:
        """The line came back, with something that tells nothing of its upstream if that is None; how many seconds it
        took."""
        start = self._starts.pop(job)
        self._limiter.ended(start, _sign_of(outcome), now)
        self.by_project[job.batch.project_id] -= 1
        seconds = now - start.at
        before = seconds if self._typical_seconds == math.inf else self._typical_seconds
        self._typical_seconds = before + _MEMORY * (seconds - before)
        return seconds


def _sign_of(outcome: Outcome | None) -> Sign:
    if outcome is None:
        return Sign.OTHER
    if not isinstance(outcome, Setback):
        return Sign.ANSWERED
    if outcome.throttled:
        return Sign.THROTTLED
    return Sign.OVERLOADED if outcome.kind in _OVERLOADS else Sign.OTHER
