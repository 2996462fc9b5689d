"""A real dispatcher on virtual time, before an upstream whose replies the test decides."""

import asyncio
from collections.abc import Callable
from typing import cast

from batchline.domain.models import Catalog
from batchline.domain.money import Tariff
from batchline.domain.replies import Reply
from batchline.domain.retry import RetryPolicy
from batchline.pipeline.dispatch.circuit_breaker import CircuitBreaker
from batchline.pipeline.dispatch.dispatcher import Dispatcher
from batchline.pipeline.dispatch.limiter import Limiter
from batchline.pipeline.job import Job
from batchline.pipeline.record import Recorder
from batchline.pipeline.token_limit import TokenLimit
from batchline.telemetry.metrics import Metrics
from tests.support.clocks import ChosenRandom
from tests.support.virtual_loop import VirtualLoop


class PendingUpstream:
    """An upstream whose replies come when the test sets them."""

    def __init__(self, new_future: Callable[[], "asyncio.Future[Reply]"]) -> None:
        self._new_future = new_future
        self.replies: list[asyncio.Future[Reply]] = []

    def post(self, path: str, body: bytes) -> "asyncio.Future[Reply]":
        self.replies.append(self._new_future())
        return self.replies[-1]


class RecorderStub:
    """Keeps the lines that ended with an outcome; ``full`` as the test sets it."""

    def __init__(self) -> None:
        self.full = False
        self.output: list[bytes] = []
        self.errors: list[bytes] = []
        self.woken = 0

    def add(self, job: Job, line: bytes, *, usage: object, cost: int = 0) -> None:
        (self.errors if usage is None else self.output).append(line)

    def wake(self) -> None:
        self.woken += 1


class DispatcherHarness(VirtualLoop):
    def __init__(self, *, cap: int = 8, patience_seconds: float = 3600.0) -> None:
        super().__init__()
        self.upstream = PendingUpstream(self.loop.create_future)
        self.recorder = RecorderStub()
        self.demands = 0
        metrics, random = Metrics(), ChosenRandom(1.0)
        self.breaker = CircuitBreaker(
            "default", clock=self.clock, random=random, patience_seconds=patience_seconds, metrics=metrics
        )
        self.dispatcher = Dispatcher(
            "default",
            upstream=self.upstream,
            catalog=Catalog(),
            token_limit=TokenLimit(tokens={}),
            tariff=Tariff(metered=False, batch_percent=50),
            recorder=cast(Recorder, self.recorder),
            breaker=self.breaker,
            policy=RetryPolicy(),
            limiter=Limiter(cap=cap),
            clock=self.clock,
            random=random,
            metrics=metrics,
            count_sync_calls=lambda: 0,
            on_line_dropped=lambda: None,
            on_demand=self._count_demand,
            find_alternative=lambda _: None,
        )
        self.loop.create_task(self.dispatcher.run())
        self.advance(0)

    def _count_demand(self) -> None:
        self.demands += 1

    @property
    def sent(self) -> int:
        """How many attempts were sent so far."""
        return len(self.upstream.replies)

    def add(self, jobs: list[Job]) -> None:
        self.call(lambda: self.dispatcher.add(jobs))

    def reply(self, reply: Reply) -> None:
        """Answer every attempt that is in flight."""
        for pending in self.upstream.replies:
            if not pending.done():
                pending.set_result(reply)
        self.advance(0)
