"""Attempts under way: a line is sent at once, and answers are handed over in groups, as they come.

With a task for every slot, what goes on around a line (a step of the loop, looks at the clock, at the limit and at
what is ready) would cost more than the line itself.
"""

import asyncio
from collections import deque

from batchline.domain.outcomes import Failure, Outcome, judge
from batchline.domain.replies import Reply
from batchline.pipeline.claim import Job
from batchline.pipeline.fit import Fitting
from batchline.ports import Clock, Upstream

_AT_A_TIME = 64
"""Answers in a group: while they are looked into, everybody else waits."""

_Attempt = asyncio.Future[Reply] | asyncio.Future[Reply | Failure]


class Attempts:
    def __init__(
        self, upstream: Upstream, *, name: str, fitting: Fitting, clock: Clock, group: asyncio.TaskGroup
    ) -> None:
        self._upstream, self._name, self._fitting = upstream, name, fitting
        self._clock, self._group = clock, group
        self._under_way: dict[_Attempt, Job] = {}
        self._over: deque[_Attempt] = deque()
        self._some_are_over = asyncio.Event()

    def send(self, job: Job) -> None:
        attempt = self._begin(job)
        self._under_way[attempt] = job
        attempt.add_done_callback(self._ended)

    async def outcomes(self) -> list[tuple[Job, Outcome]]:
        """Of the next lines that came back, once there are some. A line that did not fit was never sent."""
        if self._over:
            # There are more than one group takes, and others may go between two groups.
            await self._clock.sleep(0)
        else:
            self._some_are_over.clear()
            await self._some_are_over.wait()
        over = [self._over.popleft() for _ in range(min(len(self._over), _AT_A_TIME))]
        return [_outcome(self._under_way.pop(attempt), attempt) for attempt in over]

    def cancel(self) -> None:
        for attempt in self._under_way:
            attempt.cancel()

    def _begin(self, job: Job) -> _Attempt:
        if not job.fits:
            return self._group.create_task(self._fit_and_post(job))
        reply = self._upstream.post(job.batch.endpoint, job.body)
        return reply if isinstance(reply, asyncio.Future) else self._group.create_task(reply)

    async def _fit_and_post(self, job: Job) -> Reply | Failure:
        fitted = await self._fitting.fit(job.body, job.model, upstream=self._name)
        if not isinstance(fitted, bytes):
            return fitted
        job.body, job.fits = fitted, True
        return await self._upstream.post(job.batch.endpoint, job.body)

    def _ended(self, attempt: _Attempt) -> None:
        self._over.append(attempt)
        if len(self._over) == 1:
            self._some_are_over.set()


def _outcome(job: Job, attempt: _Attempt) -> tuple[Job, Outcome]:
    reply = attempt.result()
    if isinstance(reply, Failure):
        return job, reply
    return job, judge(reply, endpoint=job.batch.endpoint, kind=job.model.kind)
