"""Serves the embedded model as an upstream, with a child process that the first call starts.

::

    no process ──(a call)──> starting ──> serving ──(it dies)──> no process
                                └──(it cannot start)──> no process, and calls are refused; a call may start it again
                                                        after 1 s, then 2, 4, … 30 s
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from batchline.domain.held_bytes import HeldBytes
from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.ports import Clock, Random, Stream
from batchline.upstream.embedded.child import SPARE_CALLS
from batchline.upstream.embedded.download import ModelUnavailable
from batchline.upstream.embedded.errors import correct_status, reject
from batchline.upstream.embedded.process import ModelProcess
from batchline.upstream.http import HttpUpstream

T = TypeVar("T")

log = logging.getLogger(__name__)

_FIRST_RESTART_SECONDS = 1.0
_MAX_RESTART_SECONDS = 30.0
_EXIT_SECONDS = 1.0
_SECRET_BYTES = 32
_NOT_STARTED = Fault(kind=FaultKind.REFUSED, detail="the embedded model has not been started")
_CLOSED = Fault(kind=FaultKind.REFUSED, detail="the embedded model was ended")
# Clients see this text in the error of a line. The reason names a file of the machine, so only the log has it.
_CANNOT_START = Fault(
    kind=FaultKind.REFUSED, detail="the embedded model cannot be started; the log of the service says why"
)


class EmbeddedUpstream:
    """The embedded model: starts its process, restarts it after a crash, and limits the calls at once."""

    def __init__(
        self,
        *,
        weights: Path,
        names: Collection[str],
        slots: int,
        connect_timeout: float,
        request_timeout: float,
        max_answer_bytes: int,
        clock: Clock,
        random: Random,
        held_bytes: HeldBytes | None = None,
    ) -> None:
        """``names`` are the model names that the model answers to."""
        self._weights = weights
        self._names = names
        self._slots = slots
        self._connect_timeout = connect_timeout
        self._request_timeout = request_timeout
        self._max_answer_bytes = max_answer_bytes
        self._held_bytes = held_bytes
        self._clock, self._random = clock, random
        self._calls = asyncio.Semaphore(slots + SPARE_CALLS)
        self._starting = asyncio.Lock()
        self._process: ModelProcess | None = None
        self._secret = ""
        self._server: HttpUpstream | None = None
        self._refusal = _NOT_STARTED
        self._logged_reason = ""
        self._restart_seconds = 0.0
        self._restart_at = 0.0
        self._closed = False

    async def post(self, path: str, body: bytes) -> Reply:
        """Post a request and return its reply."""
        return reject(body, names=self._names) or await self._call(path, lambda server: server.post(path, body))

    async def get(self, path: str) -> Reply:
        """Send a GET request and return its reply."""
        return await self._call(path, lambda server: server.get(path))

    @asynccontextmanager
    async def stream(self, path: str, body: bytes) -> AsyncIterator[Stream | Reply]:
        """Post a request and yield its answer as a stream, or a reply if it is not streamed."""
        refused = reject(body, names=self._names)
        if refused is not None:
            yield refused
            return
        async with self._calls, AsyncExitStack() as stack:
            answer = await self._call_server(lambda server: stack.enter_async_context(server.stream(path, body)))
            yield correct_status(path, answer) if isinstance(answer, Answer) else answer

    async def close(self) -> None:
        """End the process; calls in flight end with a fault."""
        self._closed = True
        self._refusal = _CLOSED
        if self._server is not None:
            await self._server.close()
        if self._process is not None:
            await self._process.end()

    async def _call(self, path: str, call: Callable[[HttpUpstream], Awaitable[Reply]]) -> Reply:
        async with self._calls:
            reply = await self._call_server(call)
        return correct_status(path, reply) if isinstance(reply, Answer) else reply

    async def _call_server(self, call: Callable[[HttpUpstream], Awaitable[T]]) -> T | Fault:
        reply = await self._call_once(call)
        if isinstance(reply, Fault) and reply.kind is FaultKind.REFUSED and await self._has_just_exited():
            # The request was never sent, so it cannot be what ended the process, and is safe to send to the next one.
            return await self._call_once(call)
        return reply

    async def _call_once(self, call: Callable[[HttpUpstream], Awaitable[T]]) -> T | Fault:
        server = await self._running_server()
        return server if isinstance(server, Fault) else await call(server)

    async def _has_just_exited(self) -> bool:
        """Return whether the process has ended; it refuses connections some moments before its end is known."""
        if self._server is None or self._process is None:
            return False
        return await self._process.wait(timeout=_EXIT_SECONDS)

    async def _running_server(self) -> HttpUpstream | Fault:
        """Return the model's server, or a fault if it cannot be started. One caller starts it and the others wait."""
        async with self._starting:
            if self._server is not None and self._process is not None and not self._process.running:
                await self._clean_up(self._server, self._process)
            if self._server is not None:
                return self._server
            if self._closed or self._clock.steady() < self._restart_at:
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
        # If the caller is cancelled while it waits here, the next caller waits for the same process.
        url = await self._process.url(clock=self._clock)
        log.info("the embedded model serves", extra={"pid": self._process.pid})
        self._restart_seconds, self._refusal, self._logged_reason = 0.0, _NOT_STARTED, ""
        return HttpUpstream(
            url,
            api_key=self._secret,
            connect_timeout=self._connect_timeout,
            request_timeout=self._request_timeout,
            max_answer_bytes=self._max_answer_bytes,
            held_bytes=self._held_bytes,
            clock=self._clock,
        )

    async def _clean_up(self, server: HttpUpstream, process: ModelProcess) -> None:
        self._server = self._process = None
        if not self._closed:
            extra = {"pid": process.pid, "code": process.code}
            log.warning("the embedded model died, the next request starts it again", extra=extra)
        await server.close()

    def _fail(self, reason: str) -> None:
        self._process = None
        self._restart_seconds = min(_MAX_RESTART_SECONDS, 2 * self._restart_seconds or _FIRST_RESTART_SECONDS)
        self._restart_at = self._clock.steady() + self._restart_seconds
        if self._closed:
            return
        if reason != self._logged_reason:
            extra = {"reason": reason, "retry_in": self._restart_seconds}
            log.error("the embedded model cannot be started, refusing requests until the next try", extra=extra)
        self._refusal, self._logged_reason = _CANNOT_START, reason
