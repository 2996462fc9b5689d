"""The jobs that do not run: ready for a slot, or waiting for their next attempt."""

from collections import Counter, deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count

from batchline.pipeline.job import Job


class ReadyQueue:
    """Jobs that may start now. Projects take turns; within a project the earliest deadline goes first."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}
        self._order = count()
        self._served: dict[str, int] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def count(self, project_id: str) -> int:
        queue = self._queues.get(project_id)
        return 0 if queue is None else queue.size

    def add(self, job: Job) -> None:
        queue = self._queues.get(job.batch.project_id)
        if queue is None:
            queue = self._queues[job.batch.project_id] = _Queue()
        queue.add(job)
        self._size += 1

    def take(self, limit: int, *, in_flight: Counter[str], project_limit: int) -> list[Job]:
        """Take the next jobs, each from the project with the fewest in flight, up to ``project_limit`` of a project."""
        if len(self._queues) == 1:
            project_id = next(iter(self._queues))
            return self._take_of(project_id, min(limit, project_limit - in_flight[project_id]))
        counts, taken = in_flight.copy(), list[Job]()
        while self._queues and len(taken) < limit:
            project_id = min(self._queues, key=lambda name: (counts[name], self._served.get(name, 0)))
            if counts[project_id] >= project_limit:
                break
            taken += self._take_of(project_id, 1)
            counts[project_id] += 1
        return taken

    def withdraw(self, condition: Callable[[Job], bool], *, limit: int | None = None) -> list[Job]:
        withdrawn: list[Job] = []
        for project_id, queue in list(self._queues.items()):
            withdrawn += queue.withdraw(condition, limit=None if limit is None else limit - len(withdrawn))
            if not queue.size:
                self._forget(project_id)
        self._size -= len(withdrawn)
        return withdrawn

    def _take_of(self, project_id: str, limit: int) -> list[Job]:
        queue = self._queues[project_id]
        taken = queue.take(limit)
        self._size -= len(taken)
        self._served[project_id] = next(self._order)
        if not queue.size:
            self._forget(project_id)
        return taken

    def _forget(self, project_id: str) -> None:
        del self._queues[project_id]
        if not self._queues:
            self._served.clear()


class _Queue:
    """The jobs of one project, by the deadlines of their batches and else in the order they came."""

    def __init__(self) -> None:
        self.size = 0
        self._jobs: dict[int, deque[Job]] = {}
        self._deadlines: list[int] = []

    def add(self, job: Job) -> None:
        deadline = job.batch.expires_at
        jobs = self._jobs.get(deadline)
        if jobs is None:
            jobs = self._jobs[deadline] = deque()
            heappush(self._deadlines, deadline)
        jobs.append(job)
        self.size += 1

    def take(self, limit: int) -> list[Job]:
        taken: list[Job] = []
        while self._deadlines and len(taken) < limit:
            jobs = self._jobs[self._deadlines[0]]
            taken += [jobs.popleft() for _ in range(min(len(jobs), limit - len(taken)))]
            if not jobs:
                del self._jobs[heappop(self._deadlines)]
        self.size -= len(taken)
        return taken

    def withdraw(self, condition: Callable[[Job], bool], *, limit: int | None) -> list[Job]:
        found = [job for jobs in self._jobs.values() for job in jobs if condition(job)][:limit]
        removed = set(found)
        kept = {deadline: deque(job for job in jobs if job not in removed) for deadline, jobs in self._jobs.items()}
        self._jobs = {deadline: jobs for deadline, jobs in kept.items() if jobs}
        self._deadlines = list(self._jobs)
        heapify(self._deadlines)
        self.size -= len(found)
        return found


class RetryQueue:
    """Jobs that wait for their next attempt. They take no slot."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Job]] = []
        self._order = count()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next_due(self) -> float | None:
        """When the next wait is over."""
        return self._heap[0][0] if self._heap else None

    def add(self, job: Job, *, until: float) -> None:
        heappush(self._heap, (until, next(self._order), job))

    def take_due(self, now: float) -> list[Job]:
        """Take the jobs whose wait is over."""
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
