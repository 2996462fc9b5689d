"""Which ready line is next: projects take turns, and within a project the earliest deadline is first (D8)."""

from collections import Counter

import pytest

from batchline.pipeline.dispatch.queues import ReadyQueue
from batchline.pipeline.job import Job
from tests.support.jobs import make_jobs


def filled(*groups: list[Job]) -> ReadyQueue:
    ready = ReadyQueue()
    for job in (job for group in groups for job in group):
        ready.add(job)
    return ready


@pytest.mark.rule("D8", "Of a project's lines the earliest deadline is first.")
def test_the_earliest_deadline_is_first_and_else_what_came_first() -> None:
    """D8: within a project, and over as many groups as it takes."""
    late, soon, later = (make_jobs(3, expires_at=at) for at in (30, 10, 20))
    ready = filled(late, soon, later)
    taken = [job for most in (2, 5, 99) for job in ready.take(most, in_flight=Counter(), project_limit=99)]
    assert taken == soon + later + late
    assert len(ready) == 0


def test_the_project_with_the_fewest_in_flight_is_next() -> None:
    """D8: with what is being taken counted in, and alternately where they are even."""
    large, small = make_jobs(10, project_id="large"), make_jobs(4, project_id="small")
    ready = filled(large, small)
    taken = ready.take(6, in_flight=Counter(large=2), project_limit=99)
    assert [job.batch.project_id for job in taken[:2]] == ["small", "small"]
    assert Counter(job.batch.project_id for job in taken) == {"small": 4, "large": 2}
    assert (ready.count("large"), ready.count("small"), len(ready)) == (8, 0, 8)


def test_no_project_has_more_than_it_may() -> None:
    """D8: alone or beside others, the rest stays ready."""
    alone = filled(make_jobs(10))
    assert len(alone.take(8, in_flight=Counter(p=3), project_limit=5)) == 2
    assert len(alone.take(8, in_flight=Counter(p=5), project_limit=5)) == 0
    beside = filled(make_jobs(10, project_id="a"), make_jobs(10, project_id="b"))
    assert len(beside.take(99, in_flight=Counter(a=4), project_limit=5)) == 6


def test_withdrawn_lines_are_gone_and_the_others_keep_their_order() -> None:
    """C11: of every deadline and project, or as many as were asked for."""
    soon, late = make_jobs(4, expires_at=10), make_jobs(4, expires_at=20)
    other = make_jobs(2, project_id="other")
    ready = filled(late, soon, other)
    even = ready.withdraw(lambda job: job.position % 2 == 0)
    assert Counter(even) == Counter(soon[::2] + late[::2] + other[::2])
    assert len(ready.withdraw(lambda job: job.batch.project_id == "p", limit=1)) == 1
    assert (len(ready), ready.count("p"), ready.count("other")) == (4, 3, 1)
    left = ready.take(9, in_flight=Counter(other=9), project_limit=9)
    assert [job.batch.expires_at for job in left] == sorted(job.batch.expires_at for job in left)
