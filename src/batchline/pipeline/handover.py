"""Handing lines over between upstreams that serve the same models."""

from collections.abc import Callable
from typing import Protocol

from batchline.pipeline.claim import Job
from batchline.pipeline.leaving import Leaving
from batchline.pipeline.ready import Ready


class Taker(Protocol):
    def adopt(self, job: Job) -> None:
        """Take a line from another upstream of its model."""


class Handover:
    def __init__(self, *, ready: Ready, leaving: Leaving, elsewhere: Callable[[Job], Taker | None]) -> None:
        """``elsewhere`` tells who else serves a line's model and is there."""
        self._ready, self._leaving, self._elsewhere = ready, leaving, elsewhere

    def take(self, job: Job) -> bool:
        """Whether another upstream that is there took the line. One stays, to be the next probe."""
        other = None if job.suspect or not self._ready else self._elsewhere(job)
        if other is None:
            return False
        self._leaving.went(job)
        other.adopt(job)
        return True

    def take_all(self) -> None:
        """An upstream that was found to be gone keeps nothing that others can run, but a line to be probed with."""
        for job in self._ready.withdraw(lambda job: self._elsewhere(job) is not None):
            if not self.take(job):
                self._ready.add(job)

    def lend(self, upstream: str) -> Job | None:
        """A ready line that this other upstream could run as well."""
        fitting = self._ready.withdraw(lambda job: upstream in job.model.upstreams, most=1)
        for job in fitting:
            self._leaving.went(job)
        return fitting[0] if fitting else None
