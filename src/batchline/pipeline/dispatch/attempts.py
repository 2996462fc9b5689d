"""The attempts in progress: a line is sent at once, and outcomes are collected in groups.

A task for every slot would cost more than the line itself: a step of the event loop, and a check of the clock, the
limit and the queues for each answer.
"""

import asyncio
from collections import deque

from batchline.domain.outcomes import Failure, Outcome, Success, classify_reply
from batchline.domain.replies import Reply
from batchline.pipeline.job import Job
from batchline.pipeline.token_limit import TokenLimit
from batchline.ports import Clock, Upstream

_MAX_GROUP = 64
"""The most outcomes in a group. While a group is handled, nothing else runs."""
_MAX_GROUP_BYTES = 1024 * 1024
"""A group takes no further outcome after so many bytes of answers, of which each is held three times for a moment."""

_Attempt = asyncio.Future[Reply] | asyncio.Future[Reply | Failure]


class Attempts:
    """The attempts of one dispatcher that are in progress or whose outcomes were not collected yet."""

    def __init__(
        self, upstream: Upstream, *, name: str, token_limit: TokenLimit, clock: Clock, group: asyncio.TaskGroup
    ) -> None:
        self._upstream, self._name, self._token_limit = upstream, name, token_limit
        self._clock, self._group = clock, group
        self._in_progress: dict[_Attempt, Job] = {}
        self._ended_attempts: deque[_Attempt] = deque()
        self._any_ended = asyncio.Event()
        self._collected: list[_Attempt] = []
        """The attempts of the last group. They keep the bytes of their answers reserved until the group was handled."""

    def send(self, job: Job) -> None:
        attempt = self._begin(job)
        self._in_progress[attempt] = job
        attempt.add_done_callback(self._on_ended)

    async def outcomes(self) -> list[tuple[Job, Outcome]]:
        """Wait for attempts to end, and return the next group of outcomes, at most 64 or a few large ones.

        A line whose input is too long has an outcome without ever being sent.
        """
        self._collected.clear()
        if not self._ended_attempts:
            self._any_ended.clear()
            await self._any_ended.wait()
        # Other tasks may run between two groups, and answers that have arrived by now join this one.
        await self._clock.sleep(0)
        group, size = list[tuple[Job, Outcome]](), 0
        while self._ended_attempts and len(group) < _MAX_GROUP and size < _MAX_GROUP_BYTES:
            attempt = self._ended_attempts.popleft()
            self._collected.append(attempt)
            job, outcome = _outcome(self._in_progress.pop(attempt), attempt)
            group.append((job, outcome))
            size += len(outcome.body) if isinstance(outcome, Success) else 0
        return group

    def cancel(self) -> None:
        for attempt in self._in_progress:
            attempt.cancel()

    def _begin(self, job: Job) -> _Attempt:
        if not job.within_limit:
            return self._group.create_task(self._limit_and_post(job))
        reply = self._upstream.post(job.batch.endpoint, job.body)
        return reply if isinstance(reply, asyncio.Future) else self._group.create_task(reply)

    async def _limit_and_post(self, job: Job) -> Reply | Failure:
        limited = await self._token_limit.apply(job.body, job.model, upstream=self._name)
        if not isinstance(limited, bytes):
            return limited
        job.body, job.within_limit = limited, True
        return await self._upstream.post(job.batch.endpoint, job.body)

    def _on_ended(self, attempt: _Attempt) -> None:
        self._ended_attempts.append(attempt)
        if len(self._ended_attempts) == 1:
            self._any_ended.set()


def _outcome(job: Job, attempt: _Attempt) -> tuple[Job, Outcome]:
    reply = attempt.result()
    if isinstance(reply, Failure):
        return job, reply
    return job, classify_reply(reply, endpoint=job.batch.endpoint, kind=job.model.kind)
