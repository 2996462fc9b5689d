"""Attempts in progress: a line is sent at once, and outcomes are collected in groups."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from batchline.domain.outcomes import Outcome, Success
from batchline.domain.replies import Answer
from batchline.pipeline.dispatch.attempts import Attempts
from batchline.pipeline.job import Job
from batchline.pipeline.token_limit import TokenLimit
from batchline.system import SystemClock
from tests.support.dispatchers import PendingUpstream
from tests.support.jobs import make_jobs

pytestmark = pytest.mark.anyio

ANSWER = Answer(status=200, body=b"{}")


class Scene:
    """Two hundred attempts that were sent."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.upstream = PendingUpstream()
        self.attempts = Attempts(
            self.upstream, name="default", token_limit=TokenLimit(tokens={}), clock=SystemClock(), group=group
        )
        self.jobs = make_jobs(200)
        for job in self.jobs:
            job.within_limit = True
            self.attempts.send(job)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with asyncio.TaskGroup() as group:
        yield Scene(group)


async def test_a_line_is_sent_before_the_event_loop_turns(scene: Scene) -> None:
    """C11: a batch cannot be stopped between the decision to start a line and its attempt."""
    assert len(scene.upstream.replies) == len(scene.jobs)


async def test_outcomes_come_in_groups_and_other_tasks_run_between(scene: Scene) -> None:
    """However many attempts end at once, other tasks wait for 64 of them at most."""
    for reply in scene.upstream.replies:
        reply.set_result(ANSWER)
    turns = 0
    groups: list[list[tuple[Job, Outcome]]] = []

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    while sum(len(group) for group in groups) < len(scene.jobs):
        before = turns
        groups.append(await scene.attempts.outcomes())
        assert turns > before
    counting.cancel()
    assert [len(group) for group in groups] == [64, 64, 64, 8]
    assert [job for group in groups for job, _ in group] == scene.jobs
    assert all(isinstance(outcome, Success) for group in groups for _, outcome in group)


@pytest.mark.rule("F5", "What is still in flight when the grace is over is cut.")
async def test_attempts_in_progress_can_be_cancelled(scene: Scene) -> None:
    """F5: a line that is still in flight after the grace period is given up."""
    scene.attempts.cancel()
    assert all(reply.cancelled() for reply in scene.upstream.replies)


async def test_a_group_takes_few_large_answers(scene: Scene) -> None:
    """While a group is handled, its answers are held several times: 64 of 15 MB would take gigabytes."""
    large = Answer(status=200, body=b'{"text": "%b"}' % (b"x" * 700_000))
    for reply in scene.upstream.replies[:5]:
        reply.set_result(large)
    await asyncio.sleep(0)
    assert [len(await scene.attempts.outcomes()) for _ in range(3)] == [2, 2, 1]
