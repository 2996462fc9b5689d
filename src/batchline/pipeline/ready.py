"""Lines that are ready to run, and whose turn it is: projects share alike, in each the earliest deadline is first."""

from collections import Counter, deque
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count

from batchline.pipeline.claim import Job


class Ready:
    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}
        self._order = count()
        self._served: dict[str, int] = {}
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def of(self, project_id: str) -> int:
        queue = self._queues.get(project_id)
        return 0 if queue is None else queue.size

    def add(self, job: Job) -> None:
        queue = self._queues.get(job.batch.project_id)
        if queue is None:
            queue = self._queues[job.batch.project_id] = _Queue()
        queue.add(job)
        self._size += 1

    def take(self, most: int, *, in_flight: Counter[str], each: int) -> list[Job]:
        """The next lines, one by one of the project that has the fewest in flight then; none of a project that would
        have more than ``each``."""
        if len(self._queues) == 1:
            project_id = next(iter(self._queues))
            return self._take_of(project_id, min(most, each - in_flight[project_id]))
        theirs, taken = in_flight.copy(), list[Job]()
        while self._queues and len(taken) < most:
            project_id = min(self._queues, key=lambda name: (theirs[name], self._served.get(name, 0)))
            if theirs[project_id] >= each:
                break
            taken += self._take_of(project_id, 1)
            theirs[project_id] += 1
        return taken

    def withdraw(self, condition: Callable[[Job], bool], *, most: int | None = None) -> list[Job]:
        withdrawn: list[Job] = []
        for project_id, queue in list(self._queues.items()):
            withdrawn += queue.withdraw(condition, most=None if most is None else most - len(withdrawn))
            if not queue.size:
                self._forget(project_id)
        self._size -= len(withdrawn)
        return withdrawn

    def _take_of(self, project_id: str, most: int) -> list[Job]:
        queue = self._queues[project_id]
        taken = queue.take(most)
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
    """Lines of one project, by the deadlines of their batches and else as they came."""

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

    def take(self, most: int) -> list[Job]:
        taken: list[Job] = []
        while self._deadlines and len(taken) < most:
            jobs = self._jobs[self._deadlines[0]]
            taken += [jobs.popleft() for _ in range(min(len(jobs), most - len(taken)))]
            if not jobs:
                del self._jobs[heappop(self._deadlines)]
        self.size -= len(taken)
        return taken

    def withdraw(self, condition: Callable[[Job], bool], *, most: int | None) -> list[Job]:
        found = [job for jobs in self._jobs.values() for job in jobs if condition(job)][:most]
        gone = set(found)
        kept = {deadline: deque(job for job in jobs if job not in gone) for deadline, jobs in self._jobs.items()}
        self._jobs = {deadline: jobs for deadline, jobs in kept.items() if jobs}
        self._deadlines = list(self._jobs)
        heapify(self._deadlines)
        self.size -= len(found)
        return found
