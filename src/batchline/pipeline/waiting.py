"""Lines that wait for their next attempt, which holds no slot."""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count

from batchline.pipeline.claim import Job


class Waiting:
    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Job]] = []
        self._order = count()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first(self) -> float | None:
        """When the next one is due."""
        return self._heap[0][0] if self._heap else None

    def add(self, job: Job, *, until: float) -> None:
        heappush(self._heap, (until, next(self._order), job))

    def due(self, now: float) -> list[Job]:
        """Those whose wait is over, which do not wait any more."""
        jobs = []
        while self._heap and self._heap[0][0] <= now:
            jobs.append(heappop(self._heap)[2])
        return jobs

    def withdraw(self, condition: Callable[[Job], bool]) -> list[Job]:
        withdrawn = [job for _, _, job in self._heap if condition(job)]
        if withdrawn:
            self._heap = [entry for entry in self._heap if not condition(entry[2])]
            heapify(self._heap)
        return withdrawn
