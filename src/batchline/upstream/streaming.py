"""An answer of server-sent events, handed on while it comes and no faster than it is taken."""

import asyncio

from batchline.domain.errors import StreamBroken
from batchline.domain.replies import Answer, Fault, Reply
from batchline.upstream.connection import UpstreamConnection

_MOST_HELD_BYTES = 64 * 1024


class EventStream:
    """What came and was not taken yet: 64 KiB and one read from the socket at most, then the connection waits."""

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
        self.connection = connection
        self.begun = True
        self.request_id = head.request_id

    def feed(self, data: bytes) -> None:
        self._held += data
        if len(self._held) > _MOST_HELD_BYTES:
            self.connection.pause_reading()
        self._wake()

    def end(self, outcome: Reply) -> None:
        # The connection may serve others before the last bytes are taken here.
        self.connection.resume_reading()
        self._end = outcome
        self._wake()

    def leave(self) -> None:
        """Nobody reads on. After the end the connection is no longer this one's to close."""
        if self.begun and self._end is None:
            self.connection.close()

    def __aiter__(self) -> "EventStream":
        return self

    async def __anext__(self) -> bytes:
        if not self._held and self._end is None:
            await self._wait()
        if self._held:
            return self._take()
        if isinstance(self._end, Fault):
            raise StreamBroken(self._end.detail)
        raise StopAsyncIteration

    def _take(self) -> bytes:
        piece = bytes(self._held)
        self._held.clear()
        if len(piece) > _MOST_HELD_BYTES and self._end is None:
            self.connection.resume_reading()
        return piece

    async def _wait(self) -> None:
        """Until something is held or the end is known; the time counts from when somebody wanted more."""
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(self._stall_seconds, self._give_up)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _give_up(self) -> None:
        if self._end is None:
            self.connection.give_up(self._stall_seconds)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
