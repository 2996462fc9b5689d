"""Attempts under way: sent at once, handed back in groups (ARCHITECTURE, "Concurrency")."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from batchline.domain.models import Model
from batchline.domain.outcomes import Outcome, Success
from batchline.domain.replies import Answer, Reply
from batchline.pipeline.dispatch.attempts import Attempts
from batchline.pipeline.job import Job
from batchline.pipeline.token_limit import TokenLimit
from batchline.system import SystemClock
from tests.support.jobs import make_jobs

FINE = Answer(status=200, body=b"{}")


class Open:
    """An upstream whose answers come when the test says so."""

    def __init__(self) -> None:
        self.posted: list[asyncio.Future[Reply]] = []

    def post(self, path: str, body: bytes) -> asyncio.Future[Reply]:
        self.posted.append(asyncio.get_running_loop().create_future())
        return self.posted[-1]


def play(scene: Callable[[Open, Attempts, list[Job]], Awaitable[None]]) -> None:
    async def main() -> None:
        upstream, group = Open(), asyncio.TaskGroup()
        jobs = make_jobs(200)
        for job in jobs:
            job.model, job.within_limit = Model(id="m", name="m"), True
        async with group:
            attempts = Attempts(
                upstream, name="default", token_limit=TokenLimit(tokens={}), clock=SystemClock(), group=group
            )
            for job in jobs:
                attempts.send(job)
            await scene(upstream, attempts, jobs)

    asyncio.run(main())


def test_a_line_is_on_its_way_before_the_loop_turns() -> None:
    """C11: what was stopped since its turn came cannot be sent any more, as there is no such time."""

    async def scene(upstream: Open, attempts: Attempts, jobs: list[Job]) -> None:
        assert len(upstream.posted) == len(jobs)

    play(scene)


def test_answers_come_in_groups_that_let_others_go_between() -> None:
    """However many come at once, nobody waits for more than 64 of them."""

    async def scene(upstream: Open, attempts: Attempts, jobs: list[Job]) -> None:
        for reply in upstream.posted:
            reply.set_result(FINE)
        turns = 0
        groups: list[list[tuple[Job, Outcome]]] = []

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_turns())
        while sum(len(group) for group in groups) < len(jobs):
            before = turns
            groups.append(await attempts.outcomes())
            assert turns > before
        counting.cancel()
        assert [len(group) for group in groups] == [64, 64, 64, 8]
        assert [job for group in groups for job, _ in group] == jobs
        assert all(isinstance(outcome, Success) for group in groups for _, outcome in group)

    play(scene)


@pytest.mark.rule("F5", "What is still in flight when the grace is over is cut.")
def test_what_is_under_way_can_be_ended() -> None:
    """F5: a line that outlasts the grace is cut."""

    async def scene(upstream: Open, attempts: Attempts, jobs: list[Job]) -> None:
        attempts.cancel()
        assert all(reply.cancelled() for reply in upstream.posted)

    play(scene)
