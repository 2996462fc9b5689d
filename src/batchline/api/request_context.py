"""One request and its answer, with what every exchange keeps to: its id, its deadline, and a clean end."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from batchline.domain.errors import ApiError, RequestTimeout

_DISCONNECT = {"type": "http.disconnect"}


class ClientState:
    """What a connection knows of its client, beyond what ASGI tells."""

    __slots__ = ("cut_off", "gone")

    def __init__(self) -> None:
        self.cut_off = False
        """The client will send no more, in the middle of a body; it may still be reading."""
        self.gone = False
        """The connection was lost before the answer was complete."""


def client_state_of(scope: Scope) -> ClientState:
    client_state: ClientState = scope["state"].setdefault("presence", ClientState())
    return client_state


class RequestContext:
    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        *,
        headers: dict[str, str],
        stall_seconds: float,
        drain_bytes: int,
    ) -> None:
        self._receive = receive
        self._send = send
        self._headers = headers
        self._stall_seconds = stall_seconds
        self._drain_bytes = drain_bytes
        self._presence = client_state_of(scope)
        request = Headers(scope=scope)
        self._body_over = request.get("content-length", "0") == "0" and "transfer-encoding" not in request
        # A client that waits for leave to send its body does not send it after an answer.
        self._drains = request.get("expect", "").lower() != "100-continue"
        self.status: int | None = None

    async def receive(self) -> Message:
        """The next part of the body, unless it takes too long to come."""
        if self._body_over:
            return await self._receive()
        try:
            async with asyncio.timeout(self._stall_seconds):
                message = await self._next()
        except TimeoutError:
            self._drains = False
            raise RequestTimeout(f"The request's body stalled for {self._stall_seconds:g} seconds") from None
        self._drains = True
        return message

    async def send(self, message: Message) -> None:
        """An answer that comes before the body is over ends the connection, but not before the client can see it."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], *self._own_headers()]}
        elif not self._body_over and self._drains and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._drain()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    async def _next(self) -> Message:
        message = await self._receive()
        if self._presence.cut_off and message.get("more_body", False):
            message = _DISCONNECT
        self._body_over = not message.get("more_body", False)
        return message

    async def _drain(self) -> None:
        """Closing on unread bytes resets the connection, and a client that is still sending never reads the answer."""
        left = self._drain_bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(self._stall_seconds):
                while left > 0 and not self._body_over:
                    left -= len((await self._next()).get("body", b""))

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        own = self._headers if self._body_over else self._headers | {"connection": "close"}
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in own.items()]


async def body_chunks(
    request: Request, *, max_bytes: int, too_large: ApiError, cut_off: ApiError
) -> AsyncGenerator[bytes]:
    """Raises ``too_large`` as soon as that is known, which may be before the first byte."""
    if int(request.headers.get("content-length", "0")) > max_bytes:
        raise too_large
    seen = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise cut_off
        chunk: bytes = message.get("body", b"")
        seen += len(chunk)
        if seen > max_bytes:
            raise too_large
        yield chunk
        more = message.get("more_body", False)
