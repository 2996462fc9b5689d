"""Lines in flight to one upstream: how many may be, and how many of them one project's."""

import math
from collections import Counter
from collections.abc import Callable, Iterator

from batchline.pipeline.claim import Job

_QUICK_SECONDS = 0.5
"""Slots with quicker answers than this are free again before anybody minds."""
_FEW_SLOTS = 8
_MEMORY = 0.1


class InFlight:
    def __init__(self, slots: int, *, live: Callable[[], int]) -> None:
        """``live`` tells how many slots are taken by calls that somebody waits for."""
        self.slots = slots
        self._live = live
        self._jobs: set[Job] = set()
        self._typical_seconds = math.inf
        self.by_project: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._jobs)

    def __contains__(self, job: object) -> bool:
        return job in self._jobs

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    @property
    def full(self) -> bool:
        """Whoever is waited for goes before batches, but never stops them."""
        return bool(self._jobs) and len(self._jobs) + self._live() >= self.slots

    @property
    def most_of_one(self) -> int:
        """Slots that one project may take. While answers are slow it leaves one, so that others need not wait for it:
        lines that hang must not keep another project's from starting."""
        slow = self._typical_seconds > _QUICK_SECONDS and self.slots >= _FEW_SLOTS
        return self.slots - slow

    def of(self, batch_id: str) -> int:
        return sum(job.batch.id == batch_id for job in self._jobs)

    def add(self, job: Job) -> None:
        self._jobs.add(job)
        self.by_project[job.batch.project_id] += 1

    def land(self, job: Job) -> None:
        if job in self._jobs:
            self._jobs.remove(job)
            self.by_project[job.batch.project_id] -= 1

    def note_seconds(self, seconds: float) -> None:
        """How long an attempt took."""
        before = seconds if math.isinf(self._typical_seconds) else self._typical_seconds
        self._typical_seconds = before + _MEMORY * (seconds - before)
