"""A real dispatcher on virtual time, before an upstream whose replies the test decides."""

import asyncio
import random as seeded
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import cast

from msgspec import Struct
from msgspec.json import Decoder

from batchline.domain.models import Catalog
from batchline.domain.money import Tariff
from batchline.domain.replies import Reply
from batchline.domain.retry import RetryPolicy
from batchline.pipeline.dispatch.circuit_breaker import Breakers, CircuitBreaker
from batchline.pipeline.dispatch.dispatcher import Dispatcher
from batchline.pipeline.dispatch.limiter import Limiter
from batchline.pipeline.job import Job
from batchline.pipeline.record import Recorder
from batchline.pipeline.routing import SyncCalls
from batchline.pipeline.token_limit import TokenLimit
from batchline.ports import Random, Upstream
from batchline.telemetry.metrics import Metrics
from tests.simulation.virtual import SeededRandom
from tests.support.clocks import ChosenRandom
from tests.support.virtual_loop import VirtualLoop


class PendingUpstream:
    """An upstream whose replies come when the test sets them."""

    def __init__(self) -> None:
        self.replies: list[asyncio.Future[Reply]] = []

    def post(self, path: str, body: bytes) -> "asyncio.Future[Reply]":
        self.replies.append(asyncio.get_running_loop().create_future())
        return self.replies[-1]


class Request(Struct, kw_only=True):
    """An attempt of a line, as the upstream gets it."""

    model: str
    project: str
    line: str
    attempt: int = 1
    """1 for the first attempt of this line."""
    at: float = 0.0


class ScriptedUpstream:
    """An upstream that replies as a function of the test decides, which may wait first."""

    def __init__(self, script: Callable[[Request], Awaitable[Reply]]) -> None:
        self.script = script
        self.requests: list[Request] = []
        self._attempts: Counter[str] = Counter()

    async def post(self, path: str, body: bytes) -> Reply:
        request = _request.decode(body)
        self._attempts[request.line] += 1
        request.attempt, request.at = self._attempts[request.line], asyncio.get_running_loop().time()
        self.requests.append(request)
        return await self.script(request)


_request = Decoder(Request)


class RecorderStub:
    """Keeps the lines that ended with an outcome; ``full`` as the test sets it."""

    def __init__(self) -> None:
        self.full = False
        self.output: list[bytes] = []
        self.errors: list[bytes] = []
        self.succeeded: list[Job] = []
        self.woken = 0

    def add(self, job: Job, line: bytes, *, usage: object, cost: int = 0) -> None:
        if usage is None:
            self.errors.append(line)
        else:
            self.output.append(line)
            self.succeeded.append(job)

    def wake(self) -> None:
        self.woken += 1


class VirtualDispatcher(VirtualLoop):
    """A dispatcher that runs. ``sync_calls`` take slots too."""

    def __init__(
        self, upstream: Upstream, *, cap: int | None, patience_seconds: float = 3600.0, random: Random
    ) -> None:
        super().__init__()
        self.recorder = RecorderStub()
        self.demands, self.sync_calls = 0, SyncCalls()
        self.metrics = metrics = Metrics()
        self.breakers = Breakers(
            "default", clock=self.clock, random=random, patience_seconds=patience_seconds, metrics=metrics
        )
        self.dispatcher = Dispatcher(
            "default",
            upstream=upstream,
            catalog=Catalog(),
            token_limit=TokenLimit(tokens={}),
            tariff=Tariff(metered=False, batch_percent=50),
            recorder=cast(Recorder, self.recorder),
            breakers=self.breakers,
            policy=RetryPolicy(),
            limiter=Limiter(cap=cap),
            clock=self.clock,
            random=random,
            metrics=metrics,
            sync_calls=self.sync_calls,
            on_line_dropped=lambda: None,
            on_demand=self._count_demand,
            find_alternative=lambda _: None,
        )
        self.loop.create_task(self.dispatcher.run())
        self.advance(0)

    def _count_demand(self) -> None:
        self.demands += 1

    def add(self, jobs: list[Job]) -> None:
        self.call(lambda: self.dispatcher.add(jobs))

    def attempts(self, result: str) -> float:
        """Return how many attempts had a result, by the metric."""
        return sum(count for labels, count in self.metrics.attempts.counts.items() if labels[-1] == result)


class DispatcherHarness(VirtualDispatcher):
    """A dispatcher whose attempts the test answers by hand."""

    def __init__(self, *, cap: int = 8, patience_seconds: float = 3600.0) -> None:
        self.upstream = PendingUpstream()
        super().__init__(self.upstream, cap=cap, patience_seconds=patience_seconds, random=ChosenRandom(1.0))

    @property
    def breaker(self) -> CircuitBreaker:
        """The circuit breaker of the whole upstream."""
        return self.breakers.upstream

    @property
    def sent(self) -> int:
        """How many attempts were sent so far."""
        return len(self.upstream.replies)

    def reply(self, reply: Reply) -> None:
        """Answer every attempt that is in flight."""
        for pending in self.upstream.replies:
            if not pending.done():
                pending.set_result(reply)
        self.advance(0)


class ScriptedHarness(VirtualDispatcher):
    """A dispatcher before an upstream that follows a script."""

    def __init__(
        self,
        script: Callable[[Request], Awaitable[Reply]],
        *,
        cap: int | None = None,
        patience_seconds: float = 3600.0,
        seed: int = 1,
    ) -> None:
        self.upstream = ScriptedUpstream(script)
        super().__init__(
            self.upstream, cap=cap, patience_seconds=patience_seconds, random=SeededRandom(seeded.Random(seed))
        )

    @property
    def requests(self) -> list[Request]:
        return self.upstream.requests

    def succeeded(self, *, project: str | None = None, model: str | None = None) -> int:
        """Return how many lines have succeeded."""
        return sum(
            project in (None, job.batch.project_id) and model in (None, job.model.id) for job in self.recorder.succeeded
        )
