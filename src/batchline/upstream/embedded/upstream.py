"""The embedded model as an upstream: a child process that is there when it is needed.

::

    no process ──(a call)──> starting ──> serving ──(it dies)──> no process
                                └──(it cannot start)──> no process, and calls are refused; another call may start
                                                        it again after 1 s, then 2, 4, … 30
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.ports import Clock, Random, Stream
from batchline.upstream.embedded.child import SPARE_CALLS
from batchline.upstream.embedded.download import ModelUnavailable
from batchline.upstream.embedded.errors import as_refusal, refused_unasked
from batchline.upstream.embedded.process import ModelProcess
from batchline.upstream.http import HttpUpstream

T = TypeVar("T")

log = logging.getLogger(__name__)

_FIRST_WAIT = 1.0
_LONGEST_WAIT = 30.0
_DEATH_SECONDS = 1.0
_SECRET_BYTES = 32
_NOT_YET = Fault(kind=FaultKind.REFUSED, detail="the embedded model was not started yet")
_CLOSED = Fault(kind=FaultKind.REFUSED, detail="the embedded model was ended")


class EmbeddedUpstream:
    def __init__(
        self,
        *,
        weights: Path,
        slots: int,
        connect_timeout: float,
        request_timeout: float,
        max_answer_bytes: int,
        clock: Clock,
        random: Random,
    ) -> None:
        self._weights = weights
        self._slots = slots
        self._connect_timeout = connect_timeout
        self._request_timeout = request_timeout
        self._max_answer_bytes = max_answer_bytes
        self._clock, self._random = clock, random
        self._calls = asyncio.Semaphore(slots + SPARE_CALLS)
        self._starting = asyncio.Lock()
        self._process: ModelProcess | None = None
        self._secret = ""
        self._server: HttpUpstream | None = None
        self._refusal = _NOT_YET
        self._wait = 0.0
        self._not_before = 0.0
        self._closed = False

    async def post(self, path: str, body: bytes) -> Reply:
        return refused_unasked(body) or await self._call(path, lambda server: server.post(path, body))

    async def get(self, path: str) -> Reply:
        return await self._call(path, lambda server: server.get(path))

    @asynccontextmanager
    async def stream(self, path: str, body: bytes) -> AsyncIterator[Stream | Reply]:
        refused = refused_unasked(body)
        if refused is not None:
            yield refused
            return
        async with self._calls, AsyncExitStack() as stack:
            answer = await self._ask(lambda server: stack.enter_async_context(server.stream(path, body)))
            yield as_refusal(path, answer) if isinstance(answer, Answer) else answer

    async def close(self) -> None:
        """End the process; calls under way end as broken."""
        self._closed = True
        self._refusal = _CLOSED
        if self._server is not None:
            await self._server.close()
        if self._process is not None:
            await self._process.end()

    async def _call(self, path: str, call: Callable[[HttpUpstream], Awaitable[Reply]]) -> Reply:
        async with self._calls:
            reply = await self._ask(call)
        return as_refusal(path, reply) if isinstance(reply, Answer) else reply

    async def _ask(self, call: Callable[[HttpUpstream], Awaitable[T]]) -> T | Fault:
        reply = await self._try(call)
        if isinstance(reply, Fault) and reply.kind is FaultKind.REFUSED and await self._has_just_died():
            # Nothing was sent, so it is no risk to the next life.
            return await self._try(call)
        return reply

    async def _try(self, call: Callable[[HttpUpstream], Awaitable[T]]) -> T | Fault:
        server = await self._serving()
        return server if isinstance(server, Fault) else await call(server)

    async def _has_just_died(self) -> bool:
        """A process refuses connections some moments before its end is known."""
        if self._server is None or self._process is None:
            return False
        return await self._process.ended(within=_DEATH_SECONDS)

    async def _serving(self) -> HttpUpstream | Fault:
        """The model's server, which one caller starts and all wait for."""
        async with self._starting:
            if self._server is not None and self._process is not None and not self._process.lives:
                await self._bury(self._server, self._process)
            if self._server is not None:
                return self._server
            if self._closed or self._clock.steady() < self._not_before:
                return self._refusal
            try:
                self._server = await self._start()
            except (ModelUnavailable, OSError) as error:
                self._fail(str(error))
                return self._refusal
            return self._server

    async def _start(self) -> HttpUpstream:
        if self._process is None:
            self._secret = self._random.bytes(_SECRET_BYTES).hex()
            self._process = await ModelProcess.start(
                weights=self._weights, secret=self._secret, slots=self._slots, clock=self._clock
            )
        if self._closed:
            await self._process.end()
        # A caller that leaves while it waits here leaves the process to the next one.
        url = await self._process.url(clock=self._clock)
        log.info("the embedded model serves", extra={"pid": self._process.pid})
        self._wait, self._refusal = 0.0, _NOT_YET
        return HttpUpstream(
            url,
            api_key=self._secret,
            connect_timeout=self._connect_timeout,
            request_timeout=self._request_timeout,
            max_answer_bytes=self._max_answer_bytes,
            clock=self._clock,
        )

    async def _bury(self, server: HttpUpstream, process: ModelProcess) -> None:
        self._server = self._process = None
        if not self._closed:
            log.warning("the embedded model died", extra={"pid": process.pid, "code": process.code})
        await server.close()

    def _fail(self, why: str) -> None:
        self._process = None
        self._wait = min(_LONGEST_WAIT, 2 * self._wait or _FIRST_WAIT)
        self._not_before = self._clock.steady() + self._wait
        if self._closed:
            return
        if why != self._refusal.detail:
            log.error("the embedded model cannot be started", extra={"reason": why})
        self._refusal = Fault(kind=FaultKind.REFUSED, detail=why)
