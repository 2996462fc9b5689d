"""Lines that are ready to run, and whose turn it is: projects share alike, in each the earliest deadline is first."""

from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count

from batchline.pipeline.claim import Job
from batchline.pipeline.flight import InFlight


class Ready:
    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[int, int, Job]]] = {}
        self._order = count()
        self._served: dict[str, int] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def of(self, project_id: str) -> int:
        return len(self._waiting.get(project_id, ()))

    @property
    def projects(self) -> list[str]:
        return list(self._waiting)

    def add(self, job: Job) -> None:
        heap = self._waiting.setdefault(job.batch.project_id, [])
        heappush(heap, (job.batch.expires_at, next(self._order), job))
        self._size += 1

    def pop(self, flying: InFlight) -> Job | None:
        """The next line of the project that has the fewest in flight; none of a project that has all it may."""
        theirs = flying.by_project
        project_id = self._next_project(theirs)
        if project_id is None or theirs[project_id] >= flying.most_of_one:
            return None
        heap = self._waiting[project_id]
        _, _, job = heappop(heap)
        self._size -= 1
        self._served[project_id] = next(self._order)
        if not heap:
            self._forget(project_id)
        return job

    def _next_project(self, in_flight: Counter[str]) -> str | None:
        if len(self._waiting) <= 1:
            return next(iter(self._waiting), None)
        return min(self._waiting, key=lambda name: (in_flight[name], self._served.get(name, 0)))

    def withdraw(self, condition: Callable[[Job], bool], *, most: int | None = None) -> list[Job]:
        withdrawn: list[Job] = []
        for project_id, heap in list(self._waiting.items()):
            gone = [entry for entry in heap if condition(entry[2])][: None if most is None else most - len(withdrawn)]
            if gone:
                withdrawn += [job for _, _, job in gone]
                heap[:] = set(heap).difference(gone)
                heapify(heap)
            if not heap:
                self._forget(project_id)
        self._size -= len(withdrawn)
        return withdrawn

    def _forget(self, project_id: str) -> None:
        del self._waiting[project_id]
        if not self._waiting:
            self._served.clear()
