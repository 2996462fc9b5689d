"""Ends the jobs of a dispatcher with an outcome or without one, or moves them to another upstream."""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

from batchline.domain import ids
from batchline.domain.estimates import estimated_usage
from batchline.domain.money import Tariff
from batchline.domain.outcomes import KEY_UNAVAILABLE, Failure, Success, error_line, output_line
from batchline.domain.usage import NOTHING
from batchline.pipeline.dispatch.queues import ReadyQueue
from batchline.pipeline.job import Job
from batchline.pipeline.record import Recorder


class Completer:
    """Ends jobs and counts the bytes of those that a dispatcher holds.

    ``on_line_dropped`` is called for a line that ended unrecorded because its batch was stopped or is held: the shard
    can be released once nothing of it is left.
    """

    def __init__(self, *, recorder: Recorder, tariff: Tariff, on_line_dropped: Callable[[], None]) -> None:
        self._recorder, self._tariff, self._on_line_dropped = recorder, tariff, on_line_dropped
        self.draining = False
        """Whether the process stops. Jobs that are not in flight are dropped then, and other workers run them."""
        self.bytes_by_project: Counter[str] = Counter()
        """The bytes of the bodies of all jobs that are held, by project."""

    def acquire(self, job: Job) -> None:
        self.bytes_by_project[job.batch.project_id] += len(job.line.body)

    def release(self, job: Job) -> None:
        project_id = job.batch.project_id
        left = self.bytes_by_project[project_id] - len(job.line.body)
        if left:
            self.bytes_by_project[project_id] = left
        else:
            del self.bytes_by_project[project_id]

    def end_if_stopped(self, job: Job) -> bool:
        """End a job that must not start another attempt, and return whether it was one.

        A job must not if its shard is lost, its batch was stopped or is held, its key was revoked, nothing is left to
        pay for it, or the process stops.
        """
        if job.shard.lost or self.draining:
            self.drop(job)
        elif job.batch.stop is not None:
            self.end_without_attempt(job)
        elif job.shard.withheld:
            self.drop_unrecorded(job)
        elif job.batch.key_revoked:
            self.complete(job, KEY_UNAVAILABLE)
        elif (refusal := job.batch.budget.refusal) is not None:
            self.complete(job, refusal)
        else:
            return False
        return True

    def end_without_attempt(self, job: Job) -> None:
        """End a job of a stopped batch: with its last fault if it was tried, else without an outcome."""
        if job.last_fault is not None:
            self.complete(job, job.last_fault.as_failure(max(1, job.tries)))
        else:
            self.drop_unrecorded(job)

    def drop_unrecorded(self, job: Job) -> None:
        """End a job of a stopped or held batch without an outcome: its shard is released when nothing of it is left."""
        self.drop(job)
        self._recorder.wake()
        self._on_line_dropped()

    def complete(self, job: Job, outcome: Success | Failure) -> None:
        """End a job with an outcome, and pass its line of the output or error file to the recorder."""
        self.drop(job)
        if job.shard.lost:
            return
        if job.trace is not None:
            job.trace.on_outcome(outcome)
        line_id = ids.line_id(job.batch.id, job.line.index)
        if isinstance(outcome, Success):
            line = output_line(line_id, job.line.custom_id, outcome)
            usage = outcome.usage
            if usage == NOTHING:
                # The line as it is stored, so that a repair finds the same estimate.
                usage = estimated_usage(request=job.line.body, answer_bytes=len(outcome.body))
            cost = self._tariff.cost(job.model.price, usage, synchronous=False)
            self._recorder.add(job, line, usage=usage, cost=cost)
        else:
            self._recorder.add(job, error_line(line_id, job.line.custom_id, outcome), usage=None)

    def drop(self, job: Job) -> None:
        """End a job without an outcome."""
        job.batch.pending_lines -= 1
        self.release(job)


class JobTarget(Protocol):
    """Another dispatcher, as failover sees it."""

    def accept(self, job: Job) -> None:
        """Run a job that another upstream of its model had."""


class Failover:
    """Moves jobs between upstreams that serve the same models.

    ``find_alternative`` returns the dispatcher of another upstream that serves a job's model and is available.
    """

    def __init__(
        self, *, ready: ReadyQueue, completer: Completer, find_alternative: Callable[[Job], JobTarget | None]
    ) -> None:
        self._ready, self._completer, self._find_alternative = ready, completer, find_alternative

    def move(self, job: Job) -> bool:
        """Move a job to another upstream, and return whether there was one.

        One job of each model stays, for the next probe: that of another model does not end the pause of this one.
        """
        other = None if job.suspect or not self._ready.by_model[job.model.id] else self._find_alternative(job)
        if other is None:
            return False
        self._completer.release(job)
        other.accept(job)
        return True

    def move_all(self, *, is_paused: Callable[[str], bool]) -> None:
        """Move every ready job of a paused model that another upstream can run, except one of each to probe with."""
        for job in self._ready.withdraw(
            lambda job: is_paused(job.model.id) and self._find_alternative(job) is not None
        ):
            if not self.move(job):
                self._ready.add(job)

    def lend_job(self, upstream: str) -> Job | None:
        """Give away one ready job that another upstream could run, to be its probe."""
        jobs = self._ready.withdraw(lambda job: upstream in job.model.upstreams, limit=1)
        for job in jobs:
            self._completer.release(job)
        return jobs[0] if jobs else None
