"""Holds the estimated cost of lines against their budgets, and keeps the lines that wait for money."""

from collections import deque
from collections.abc import Callable, Set

from batchline.pipeline.dispatch.completion import Completer
from batchline.pipeline.dispatch.in_flight import InFlight
from batchline.pipeline.dispatch.queues import ReadyQueue
from batchline.pipeline.job import Job

_TRIED_PER_RELEASE = 2
"""Money that one line in flight did not need may suffice for two that wait. If it does, each of them tries two more."""


class Funding:
    """The money that lines in flight hold, and the lines that wait until some of it is released.

    ``make_ready`` lets a line of a batch with a limit of its own be chosen again.
    """

    def __init__(
        self, *, ready: ReadyQueue, in_flight: InFlight, completer: Completer, make_ready: Callable[[Job], None]
    ) -> None:
        self._ready, self._in_flight, self._completer, self._make_ready = ready, in_flight, completer, make_ready
        self._waiting_projects: set[str] = set()
        self._waiting_jobs: dict[str, deque[Job]] = {}
        """Jobs, by batch, that wait until lines in flight release what they hold of the batch's own limit."""

    @property
    def waiting_projects(self) -> Set[str]:
        """Projects whose next line waits until requests in flight release what they hold of the same budget."""
        return self._waiting_projects

    def hold(self, job: Job, *, must_start: bool) -> bool:
        """Hold the estimated cost of a job against its budget, and return whether the job may start.

        If too little is left, the job waits for the requests that hold the rest, and fails if there are none. One that
        must start does so in any case, and holds nothing then.
        """
        held = job.batch.budget.hold(job.estimate)
        if isinstance(held, int) or must_start:
            job.held = held if isinstance(held, int) else 0
            return True
        if not held.held:
            self._completer.complete(job, held.failure)
        elif held.of_batch:
            self._waiting_jobs.setdefault(job.batch.id, deque()).append(job)
        else:
            self._waiting_projects.add(job.batch.project_id)
            self._ready.add(job, first=True)
        return False

    def release(self, job: Job) -> None:
        """Release what a job holds, and let lines that wait for it be chosen again."""
        job.batch.budget.release(job.held)
        job.held = 0
        self._waiting_projects.clear()
        if job.batch.id in self._waiting_jobs:
            self._retry(job.batch.id)

    def on_funds_changed(self) -> bool:
        """Let the lines that wait be chosen again, and return whether there are any."""
        if not (self._waiting_projects or self._waiting_jobs):
            return False
        self._waiting_projects.clear()
        for batch_id in list(self._waiting_jobs):
            self._retry(batch_id)
        return True

    def withdraw(self, condition: Callable[[Job], bool]) -> list[Job]:
        """Take out the jobs that meet a condition and wait for money of their batch."""
        withdrawn = list[Job]()
        for batch_id, jobs in list(self._waiting_jobs.items()):
            withdrawn += [job for job in jobs if condition(job)]
            if left := deque(job for job in jobs if not condition(job)):
                self._waiting_jobs[batch_id] = left
            else:
                del self._waiting_jobs[batch_id]
        return withdrawn

    def _retry(self, batch_id: str) -> None:
        """Make lines ready that wait for money of their batch: a few, or all if no line of it is in flight."""
        waiting = self._waiting_jobs.pop(batch_id)
        tried = _TRIED_PER_RELEASE if any(job.batch.id == batch_id for job in self._in_flight) else len(waiting)
        for _ in range(min(tried, len(waiting))):
            self._make_ready(waiting.popleft())
        if waiting:
            self._waiting_jobs[batch_id] = waiting
