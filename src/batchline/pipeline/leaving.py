"""The lines a dispatcher holds, and how they leave: with an outcome for the recorder, or without when they are not to
run any more."""

from collections import Counter
from collections.abc import Callable

from batchline.domain import ids
from batchline.domain.money import Tariff
from batchline.domain.outcomes import KEY_UNAVAILABLE, OUT_OF_QUOTA, Failure, Success, error_line, output_line
from batchline.pipeline.claim import Job
from batchline.pipeline.record import Recorder


class Leaving:
    def __init__(self, *, recorder: Recorder, tariff: Tariff, changed: Callable[[], None]) -> None:
        self._recorder, self._tariff, self._changed = recorder, tariff, changed
        self.draining = False
        """Whatever does not run yet goes back as it came."""
        self.bytes_of: Counter[str] = Counter()
        """Bodies of lines that are here, by project."""

    def came(self, job: Job) -> None:
        self.bytes_of[job.batch.project_id] += len(job.line.body)

    def went(self, job: Job) -> None:
        """To another upstream, or for good."""
        project_id = job.batch.project_id
        left = self.bytes_of[project_id] - len(job.line.body)
        if left:
            self.bytes_of[project_id] = left
        else:
            del self.bytes_of[project_id]

    def may_go_on(self, job: Job) -> bool:
        """False when the job ended here: its shard is lost, its batch stopped, its key revoked, its organization out
        of money, or we go down."""
        if job.shard.lost or self.draining:
            self.let_go(job)
        elif job.batch.stop is not None:
            self.end_without_attempt(job)
        elif job.batch.key_revoked:
            self.settle(job, KEY_UNAVAILABLE)
        elif job.batch.budget.spent:
            self.settle(job, OUT_OF_QUOTA)
        else:
            return True
        return False

    def end_without_attempt(self, job: Job) -> None:
        """A line that was tried ends with its last fault, one that never ran with none."""
        if job.last is not None:
            self.settle(job, job.last.as_failure(max(1, job.attempts)))
        else:
            self.let_go(job)
            self._recorder.look_again()
            self._changed()

    def settle(self, job: Job, outcome: Success | Failure) -> None:
        self.let_go(job)
        if job.shard.lost:
            return
        line_id = ids.line_id(job.batch.id, job.line.index)
        if isinstance(outcome, Success):
            line = output_line(line_id, job.line.custom_id, outcome)
            cost = self._tariff.cost(job.model.price, outcome.usage, waited_for=False)
            self._recorder.add(job, line, usage=outcome.usage, cost=cost)
        else:
            self._recorder.add(job, error_line(line_id, job.line.custom_id, outcome), usage=None)

    def let_go(self, job: Job) -> None:
        """Without a word to the recorder."""
        job.batch.unanswered -= 1
        self.went(job)
