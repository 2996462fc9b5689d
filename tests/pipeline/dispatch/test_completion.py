"""How a job leaves a dispatcher: with an outcome, without one, or to another upstream (C11, D2, D3)."""

from typing import cast

import pytest

from batchline.domain.models import Model
from batchline.domain.money import Tariff
from batchline.domain.outcomes import Retryable
from batchline.domain.states import Stop
from batchline.pipeline.budget import Budgets
from batchline.pipeline.dispatch.completion import Completer, Failover
from batchline.pipeline.dispatch.queues import ReadyQueue
from batchline.pipeline.job import Job
from batchline.pipeline.record import Recorder
from tests.support.dispatchers import RecorderStub
from tests.support.jobs import make_jobs

FAULT = Retryable("http_500", "the upstream answered 500")


class Scene:
    """One job that a completer holds."""

    def __init__(self) -> None:
        self.recorder = RecorderStub()
        self.dropped = 0
        self.completer = Completer(
            recorder=cast(Recorder, self.recorder),
            tariff=Tariff(metered=False, batch_percent=50),
            on_line_dropped=self._count,
        )
        (self.job,) = make_jobs(1)
        self.job.batch.pending_lines = 1
        self.completer.acquire(self.job)

    def _count(self) -> None:
        self.dropped += 1

    def ends(self) -> tuple[bool, list[bytes]]:
        """Whether the job ended, and with which error lines."""
        ended = self.completer.end_if_stopped(self.job)
        assert (self.job.batch.pending_lines == 0) is ended
        assert (self.completer.bytes_by_project.total() == 0) is ended
        return ended, self.recorder.errors


def test_a_job_that_may_run_does_not_end() -> None:
    assert Scene().ends() == (False, [])


def test_a_job_of_a_lost_shard_or_of_a_process_that_stops_ends_without_an_outcome() -> None:
    """Another worker runs it."""
    lost, draining = Scene(), Scene()
    lost.job.shard.lost = True
    draining.completer.draining = True
    assert [lost.ends(), draining.ends()] == [(True, [])] * 2
    assert (lost.dropped, draining.dropped) == (0, 0)


def test_a_job_of_a_stopped_batch_ends_without_an_outcome_if_it_never_ran() -> None:
    """C11: the finalizer writes its error line, and the shard can be released."""
    scene = Scene()
    scene.job.batch.stop = Stop.CANCELLED
    assert scene.ends() == (True, [])
    assert (scene.dropped, scene.recorder.woken) == (1, 1)


def test_a_job_of_a_stopped_batch_ends_with_its_last_fault_if_it_was_tried() -> None:
    """C11: what the upstream answered is not hidden by the stop."""
    scene = Scene()
    scene.job.batch.stop, scene.job.last_fault, scene.job.attempts = Stop.EXPIRED, FAULT, 2
    ended, (line,) = scene.ends()
    assert ended
    assert b"the upstream answered 500" in line


@pytest.mark.parametrize("reason", ["key", "quota"])
def test_a_job_without_a_key_or_funds_fails_with_that_reason(reason: str) -> None:
    """D2, D4."""
    scene = Scene()
    if reason == "key":
        scene.job.batch.key_revoked = True
    else:
        scene.job.batch.budget = Budgets(metered=True).of("o")
        scene.job.batch.budget.update_balance(0, read_at=0)
    ended, (line,) = scene.ends()
    assert ended
    assert (b"insufficient_quota" in line) is (reason == "quota")


class Target:
    def __init__(self) -> None:
        self.accepted: list[Job] = []

    def accept(self, job: Job) -> None:
        self.accepted.append(job)


def test_all_ready_jobs_but_one_move_to_another_upstream() -> None:
    """D3: the one that stays is the next probe. Their bytes are no longer counted here."""
    scene, ready, other = Scene(), ReadyQueue(), Target()
    scene.completer.release(scene.job)
    failover = Failover(ready=ready, completer=scene.completer, find_alternative=lambda _: other)
    for job in make_jobs(5):
        scene.completer.acquire(job)
        ready.add(job)
    failover.move_all(is_paused=lambda _: True)
    assert (len(ready), len(other.accepted)) == (1, 4)
    # The names of batches are numbered, so bodies differ by a digit.
    assert abs(scene.completer.bytes_by_project["p"] - len(scene.job.line.body)) <= 1


def test_the_pause_of_a_model_moves_its_jobs_alone_and_leaves_one_to_probe_with() -> None:
    """D3: the other model is available here. Its lines do not probe the model that is paused."""
    scene, ready, other = Scene(), ReadyQueue(), Target()
    failover = Failover(ready=ready, completer=scene.completer, find_alternative=lambda _: other)
    for job in make_jobs(5, model="there") + make_jobs(5, model="paused"):
        scene.completer.acquire(job)
        ready.add(job)
    failover.move_all(is_paused=lambda model: model == "paused")
    assert ready.by_model == {"there": 5, "paused": 1}
    assert {job.model.id for job in other.accepted} == {"paused"}


def test_a_suspect_does_not_move() -> None:
    """D5: it would crash the other upstream too."""
    scene, ready, other = Scene(), ReadyQueue(), Target()
    ready.add(make_jobs(1)[0])
    failover = Failover(ready=ready, completer=scene.completer, find_alternative=lambda _: other)
    scene.job.suspect = True
    assert not failover.move(scene.job)
    scene.job.suspect = False
    assert failover.move(scene.job)


def test_a_job_is_lent_only_to_an_upstream_of_its_model() -> None:
    scene, ready = Scene(), ReadyQueue()
    scene.job.model = Model(id="m", name="m", upstreams=("first", "second"))
    ready.add(scene.job)
    failover = Failover(ready=ready, completer=scene.completer, find_alternative=lambda _: None)
    assert failover.lend_job("third") is None
    assert failover.lend_job("second") is scene.job
    assert (len(ready), scene.completer.bytes_by_project.total()) == (0, 0)
