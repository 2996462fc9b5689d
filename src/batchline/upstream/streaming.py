"""Passes on an answer of server-sent events while it arrives, no faster than it is read."""

import asyncio

from batchline.domain.errors import StreamBroken
from batchline.domain.replies import Answer, Fault, Reply
from batchline.upstream.connection import UpstreamConnection

_MAX_HELD_BYTES = 64 * 1024


class EventStream:
    """The body of an answer, in pieces, as an asynchronous iterator.

    It holds at most 64 KiB and one read from the socket; beyond that the connection pauses reading.
    """

    connection: UpstreamConnection

    def __init__(self, *, stall_seconds: float) -> None:
        self.request_id: str | None = None
        self.begun = False
        self._stall_seconds = stall_seconds
        self._loop = asyncio.get_running_loop()
        self._held = bytearray()
        self._end: Reply | None = None
        self._waiter: asyncio.Future[None] | None = None

    def begin(self, head: Answer, connection: UpstreamConnection) -> None:
        """Note that the answer is a stream, and the connection that it arrives on."""
        self.connection = connection
        self.begun = True
        self.request_id = head.request_id

    def feed(self, data: bytes) -> None:
        """Hold the next bytes until they are read; pause the connection if too many are held."""
        self._held += data
        if len(self._held) > _MAX_HELD_BYTES:
            self.connection.pause_reading()
        self._wake()

    def end(self, outcome: Reply) -> None:
        """Note how the answer ended; what is held can still be read."""
        # The connection may serve other requests before the last bytes are read here.
        self.connection.resume_reading()
        self._end = outcome
        self._wake()

    def abandon(self) -> None:
        """Stop reading: close the connection, unless the answer has ended and it may serve another request now."""
        if self.begun and self._end is None:
            self.connection.close()

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> bytes:
        while not self._held and self._end is None:
            await self._wait()
        if self._held:
            return self._take()
        if isinstance(self._end, Fault):
            raise StreamBroken(self._end.detail)
        raise StopAsyncIteration

    def _take(self) -> bytes:
        piece = bytes(self._held)
        self._held.clear()
        if len(piece) > _MAX_HELD_BYTES and self._end is None:
            self.connection.resume_reading()
        return piece

    async def _wait(self) -> None:
        """Wait until bytes are held or the answer has ended; the stall timeout counts from here."""
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(self._stall_seconds, self._fail_stalled)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _fail_stalled(self) -> None:
        if self._end is None:
            self.connection.fail_stalled(self._stall_seconds)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
