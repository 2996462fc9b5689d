"""Which ready line is next: of the project with the fewest in flight, by deadline, and then by model (D8)."""

from collections import Counter
from collections.abc import Mapping

import pytest

from batchline.domain.outcomes import Retryable
from batchline.pipeline.dispatch.queues import ReadyQueue, RetryQueue
from batchline.pipeline.job import Job
from tests.support.jobs import make_jobs

MANY = 99


def filled(*groups: list[Job]) -> ReadyQueue:
    ready = ReadyQueue()
    for job in (job for group in groups for job in group):
        ready.add(job)
    return ready


def take(
    ready: ReadyQueue,
    limit: int = MANY,
    *,
    in_flight: Mapping[str, int] = {},
    in_flight_of_lane: Mapping[tuple[str, str], int] = {},
    limits: Mapping[str, int] = {},
    allowances: Mapping[str, int] = {},
) -> list[Job]:
    """Take jobs. Projects that are not in ``limits`` and models that are not in ``allowances`` have none."""
    return ready.take(
        limit,
        in_flight=Counter(in_flight),
        in_flight_of_lane=in_flight_of_lane,
        limit_of=lambda project_id: limits.get(project_id, MANY),
        allowance_of=lambda model: allowances.get(model, MANY),
    )


def models(jobs: list[Job]) -> str:
    return "".join(job.model.id for job in jobs)


@pytest.mark.rule("D8", "Of a project's lines the earliest deadline is first.")
def test_the_earliest_deadline_is_first_and_else_what_came_first() -> None:
    """D8: within a project, and over as many groups as it takes."""
    late, soon, later = (make_jobs(3, expires_at=at) for at in (30, 10, 20))
    ready = filled(late, soon, later)
    taken = [job for most in (2, 5, MANY) for job in take(ready, most)]
    assert taken == soon + later + late
    assert len(ready) == 0


def test_the_project_with_the_fewest_in_flight_is_next() -> None:
    """D8: with what is being taken counted in, and alternately where they are even."""
    large, small = make_jobs(10, project_id="large"), make_jobs(4, project_id="small")
    ready = filled(large, small)
    taken = take(ready, 6, in_flight={"large": 2})
    assert [job.batch.project_id for job in taken[:2]] == ["small", "small"]
    assert Counter(job.batch.project_id for job in taken) == {"small": 4, "large": 2}
    assert (list(ready.projects), len(ready)) == (["large"], 8)


def test_projects_with_as_many_in_flight_take_turns() -> None:
    """D8: also if lines are taken one by one."""
    ready = filled(make_jobs(4, project_id="a"), make_jobs(4, project_id="b"), make_jobs(4, project_id="c"))
    taken = [job for _ in range(6) for job in take(ready, 1)]
    assert [job.batch.project_id for job in taken] == ["a", "b", "c", "a", "b", "c"]


def test_a_project_takes_no_slot_that_it_must_leave_to_others() -> None:
    """D8: alone or beside others, the rest stays ready."""
    alone = filled(make_jobs(10))
    assert len(take(alone, 8, limits={"p": 2})) == 2
    assert take(alone, 8, limits={"p": 0}) == []
    beside = filled(make_jobs(10, project_id="a"), make_jobs(10, project_id="b"))
    taken = take(beside, 8, limits={"a": 7, "b": 7})
    assert Counter(job.batch.project_id for job in taken) == {"a": 4, "b": 3}, "both must leave the same slot"
    quick = filled(make_jobs(10, project_id="slow"), make_jobs(10, project_id="quick"))
    taken = take(quick, 8, limits={"slow": 3, "quick": 8})
    assert Counter(job.batch.project_id for job in taken) == {"slow": 2, "quick": 6}


@pytest.mark.rule("D8", "Models of one project with the same deadline take turns.")
def test_models_with_the_same_deadline_take_turns() -> None:
    """D8: a project's many lines of one model do not keep its others waiting."""
    many, few = make_jobs(50, model="m"), make_jobs(3, model="f")
    ready = filled(many, few)
    taken = [job for _ in range(8) for job in take(ready, 1)]
    assert models(taken) == "mfmfmfmm"
    assert [job for job in taken if job.model.id == "m"] == many[:5]


@pytest.mark.parametrize("others", [0, 1])
def test_the_model_with_the_fewest_in_flight_is_next(others: int) -> None:
    """D8: otherwise the lines of a slow model would take one slot after the other. What is being taken counts too."""
    ready = filled(make_jobs(50, model="s"), make_jobs(50, model="q"), make_jobs(others, project_id="other"))
    in_flight = {("p", "s"): 5, ("p", "q"): 2, ("other", "q"): 9}
    taken = take(ready, 9, in_flight={"other": 99}, in_flight_of_lane=in_flight)
    assert models(taken) == "qqqsqsqsq"


def test_the_earliest_deadline_goes_before_the_turns_of_models() -> None:
    """D8."""
    ready = filled(make_jobs(3, model="l", expires_at=20), make_jobs(3, model="s", expires_at=10))
    assert models(take(ready, 1) + take(ready, 3)) == "sssl"


@pytest.mark.rule("D9", "A model that may not start keeps no other model of its project waiting.")
def test_a_blocked_model_is_skipped() -> None:
    """D9: also if its deadline is the earliest, and for as long as it is blocked."""
    ready = filled(make_jobs(5, model="b", expires_at=10), make_jobs(5, model="o", expires_at=20))
    assert models(take(ready, 3, allowances={"b": 0})) == "ooo"
    assert models(take(ready, allowances={"b": 1})) == "boo"
    assert ready.by_model == {"b": 4}
    assert take(ready, allowances={"b": 0}) == []
    assert len(take(ready)) == 4


def test_the_allowance_of_a_model_is_for_all_projects_together() -> None:
    """D9: the upstream refuses by model, and projects share what it accepts."""
    ready = filled(*(make_jobs(5, project_id=project, model="b") for project in "xyz"))
    taken = take(ready, allowances={"b": 4})
    assert Counter(job.batch.project_id for job in taken) == {"x": 2, "y": 1, "z": 1}


def test_a_project_whose_models_are_blocked_takes_no_turn_of_others() -> None:
    """D9: though it has the fewest in flight."""
    ready = filled(make_jobs(5, project_id="blocked", model="b"), make_jobs(5, project_id="free", model="o"))
    assert models(take(ready, in_flight={"free": 50}, allowances={"b": 0})) == "ooooo"


def test_a_line_of_one_project_and_model_can_be_taken() -> None:
    """D3: it is a probe, whoever has the fewest in flight."""
    ready = filled(make_jobs(2, project_id="a", model="m"), make_jobs(2, project_id="a", model="n"))
    ready.add(make_jobs(1, project_id="b", model="n")[0])
    assert set(ready.lanes()) == {("a", "m"), ("a", "n"), ("b", "n")}
    (job,) = ready.take_lane("b", "n")
    assert (job.batch.project_id, job.model.id) == ("b", "n")
    assert set(ready.lanes()) == {("a", "m"), ("a", "n")}


def test_a_line_that_goes_first_is_taken_before_those_of_its_deadline() -> None:
    """D3: a line that was a probe is the next probe too."""
    ready, (first,) = filled(make_jobs(3, expires_at=10)), make_jobs(1, expires_at=10)
    ready.add(first, first=True)
    assert take(ready, 1) == [first]


def test_withdrawn_lines_are_gone_and_the_others_keep_their_order() -> None:
    """C11: of every deadline, project and model, or as many as were asked for."""
    soon, late = make_jobs(4, expires_at=10), make_jobs(4, expires_at=20, model="n")
    other = make_jobs(2, project_id="other")
    ready = filled(late, soon, other)
    even = ready.withdraw(lambda job: job.position % 2 == 0)
    assert Counter(even) == Counter(soon[::2] + late[::2] + other[::2])
    assert len(ready.withdraw(lambda job: job.batch.project_id == "p", limit=1)) == 1
    counts = [ready.untried_by_model(project_id) for project_id in ("p", "other", "unknown")]
    assert (len(ready), counts) == (4, [{"m": 2, "n": 1}, {"m": 1}, {}])
    left = take(ready, 9, in_flight={"other": 9})
    assert [job.batch.expires_at for job in left] == [10, 10, 20, 1]
    assert (len(ready), dict(ready.by_model), ready.lanes()) == (0, {}, [])


@pytest.mark.rule("D3", "Lines that are tried again take turns with those that were never tried.")
def test_lines_that_are_tried_again_take_turns_with_the_others() -> None:
    """D3, D9: neither lines that are always refused nor the many that were never tried hold up the rest."""
    untried, again = make_jobs(3, expires_at=10), make_jobs(5, expires_at=10)
    for job in again:
        job.last_fault = Retryable("http_429", "", throttled=True)
    ready = filled(untried, again)
    assert ready.untried_by_model("p") == {"m": 3}
    expected = [again[0], untried[0], again[1], untried[1], again[2], untried[2], again[3], again[4]]
    assert [take(ready, 1)[0], *take(ready, 4), *take(ready)] == expected
    assert (len(ready), dict(ready.by_model)) == (0, {})


def _due(retries: RetryQueue, now: float, *, ready: str = "") -> list[Job]:
    """Take what is due while jobs of one model, or of none, could start."""
    return retries.take_due(now, has_ready=lambda model: model == ready)


def test_a_retry_waits_until_its_time() -> None:
    """D3: in the order of their times, and counted for their project."""
    retries, jobs = RetryQueue(), make_jobs(3)
    for job, until in zip(jobs, (30.0, 10.0, 20.0), strict=True):
        retries.add(job, until=until)
    assert (retries.next_due, _due(retries, 9.9), retries.by_project["p"]) == (10.0, [], 3)
    assert _due(retries, 20.0) == [jobs[1], jobs[2]]
    assert (retries.next_due, retries.by_project["p"]) == (30.0, 1)
    assert retries.withdraw(lambda job: job.batch is jobs[0].batch) == [jobs[0]]
    assert (retries.next_due, dict(retries.by_project), dict(retries.by_batch)) == (None, {}, {})


def test_a_job_that_yields_waits_for_the_others_of_its_model() -> None:
    """It looks again every second, and starts in any case when its time is over."""
    retries, [idle, busy] = RetryQueue(), [make_jobs(1, model=model)[0] for model in ("idle", "busy")]
    for job in (idle, busy):
        job.yields_until = 12.5
        retries.add(job, until=10.0)
    assert _due(retries, 10.0, ready="busy") == [idle]
    assert (retries.next_due, dict(retries.by_model)) == (11.0, {"busy": 1})
    assert (_due(retries, 11.0, ready="busy"), _due(retries, 12.0, ready="busy")) == ([], [])
    assert _due(retries, 13.0, ready="busy") == [busy]
    assert (len(retries), dict(retries.by_model)) == (0, {})
