"""The upstream of a simulated world: scripted, unavailable at times, and killed by certain lines."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.upstream.mock.script import Ending, Script, ScriptedOutcome
from tests.simulation.virtual import Time

RESTART_SECONDS = 2.0
WORKER_POISON = b"KILL-WORKER"


class Machine:
    """The process of the upstream. It keeps its script when the service dies, and may be down."""

    def __init__(self, script: Script, time: Time) -> None:
        self.script, self._time = script, time
        self.down_until = 0.0
        self.starts: dict[bytes, int] = {}
        self._crashed = 0

    @property
    def down(self) -> bool:
        return self._time.now < self.down_until

    def crash(self, seconds: float) -> None:
        self._crashed += 1
        self.down_until = max(self.down_until, self._time.now + seconds)

    def crashes(self) -> int:
        return self._crashed


class SimulatedUpstream:
    """The connection of one process of the service to the machine."""

    def __init__(
        self, machine: Machine, *, request_timeout: float, latency: float, kill_worker: Callable[[], None]
    ) -> None:
        self._machine, self._timeout, self._latency = machine, request_timeout, latency
        self._kill_worker = kill_worker

    async def post(self, path: str, body: bytes) -> Reply:
        await asyncio.sleep(0.001)
        if self._machine.down:
            return Fault(kind=FaultKind.REFUSED, detail="connection refused")
        if WORKER_POISON in body:
            self._kill_worker()
            await asyncio.Event().wait()
        self._machine.starts[body] = self._machine.starts.get(body, 0) + 1
        outcome = self._machine.script.decide(path, body)
        if outcome.ending is Ending.HANG:
            return await self._wait(self._timeout) or Fault(kind=FaultKind.TIMEOUT, detail="timeout")
        return await self._wait(outcome.delay or self._latency) or self._end(outcome)

    async def get(self, path: str) -> Reply:
        return Answer(status=404, body=b"{}", request_id=None, retry_after=None)

    @asynccontextmanager
    async def stream(self, path: str, body: bytes) -> AsyncIterator[Reply]:
        """Answer without events, as an upstream that does not stream."""
        yield await self.post(path, body)

    async def _wait(self, seconds: float) -> Reply | None:
        """Wait, and return a fault if the machine crashes meanwhile."""
        before = self._machine.crashes()
        slept = 0.0
        while slept < seconds:
            nap = min(0.05, seconds - slept) if seconds < 2 else min(0.2, seconds - slept)
            await asyncio.sleep(nap)
            slept += nap
            if self._machine.crashes() != before:
                return Fault(kind=FaultKind.BROKEN, detail="the connection broke")
        return None

    def _end(self, outcome: ScriptedOutcome) -> Reply:
        if outcome.ending is Ending.CRASH:
            self._machine.crash(RESTART_SECONDS)
        if outcome.ending is not Ending.WHOLE:
            return Fault(kind=FaultKind.BROKEN, detail="the connection broke")
        return Answer(
            status=outcome.status,
            body=outcome.body,
            request_id=outcome.request_id,
            retry_after=outcome.retry_after,
        )
