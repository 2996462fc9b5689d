"""The context of one request: a deadline for its body, common headers of its answer, a clean end of the connection."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BytesIO
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from batchline.domain.errors import ApiError, RequestTimeout

_DISCONNECT = {"type": "http.disconnect"}
_MIN_BODY_PROGRESS_BYTES = 16 * 1024
"""The bytes of a body that must arrive within the deadline if its rest does not. Otherwise a client that sends a byte
now and then could hold a slot and a file for days."""
_UNAUTHENTICATED_DRAIN_SECONDS = 5.0
"""The longest time for which the rest of a body is read after an answer to a request that nobody authenticated."""


class ClientState:
    """The facts about its client that a connection knows beyond ASGI."""

    __slots__ = ("closing", "cut_off", "disconnected", "on_body_wait", "only_drains", "waits_for_body")

    def __init__(self) -> None:
        self.cut_off = False
        """Whether the rest of a body will not come, because the client stopped sending or sent bytes that are not HTTP.
        The client may still read."""
        self.closing = False
        """Whether the service is shutting down: an answer that has no end of its own must end now."""
        self.disconnected = False
        """Whether the connection was lost before the answer was complete."""
        self.waits_for_body = False
        """Whether a request that nobody authenticated waits for its body."""
        self.only_drains = False
        """Whether the answer was sent, and only the rest of the request's body is read."""
        self.on_body_wait: Callable[[], None] = _do_nothing
        """The function to call when ``waits_for_body`` or ``only_drains`` becomes True."""

    @contextmanager
    def waiting_for_body(self) -> Iterator[None]:
        """Note that a request that nobody authenticated waits for its body."""
        self.waits_for_body = True
        self.on_body_wait()
        try:
            yield
        finally:
            self.waits_for_body = False

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Note that the answer was sent and only the rest of the body is read."""
        self.only_drains = True
        self.on_body_wait()
        try:
            yield
        finally:
            self.only_drains = False

    def stop_notifying(self) -> None:
        """Call ``on_body_wait`` no more."""
        self.on_body_wait = _do_nothing


def _do_nothing() -> None:
    """Stand in for a connection that need not be notified."""


def client_state_of(scope: Scope) -> ClientState:
    """Return the state that the connection keeps for this request."""
    client_state: ClientState = scope["state"].setdefault("client_state", ClientState())
    return client_state


def is_authenticated(state: Mapping[str, Any]) -> bool:
    """Return whether the request with this state had a valid key, or a session of one."""
    return "project_id" in state


class RequestContext:
    """Wraps ``receive`` and ``send`` of one request."""

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
        self._client_state = client_state_of(scope)
        self._state: Mapping[str, Any] = scope["state"]
        request = Headers(scope=scope)
        self._body_complete = request.get("content-length", "0") == "0" and "transfer-encoding" not in request
        # A client that waits for ``100 Continue`` does not send its body after an answer.
        self._drains = request.get("expect", "").lower() != "100-continue"
        self.status: int | None = None
        self._progress_bytes, self._waited_seconds = 0, 0.0
        """The bytes of the body since its last progress, and the time for which they were waited for."""

    async def receive(self) -> Message:
        """Return the next part of the body. Raise RequestTimeout if it makes too little progress in ``stall_seconds``.

        Only the time for which the handler waits counts.
        """
        if self._body_complete:
            return await self._receive()
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(max(0.0, self._stall_seconds - self._waited_seconds)):
                message = await self._next_for_handler()
        except TimeoutError:
            self._drains = False
            raise RequestTimeout(f"The request's body stalled for {self._stall_seconds:g} seconds") from None
        self._drains = True
        self._note_progress(len(message.get("body", b"")), loop.time() - began)
        return message

    async def send(self, message: Message) -> None:
        """Send a message of the answer, with the common headers.

        An answer that ends before the body is complete closes the connection. The rest of the body is read first, so
        that the client can read the answer.
        """
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message = {**message, "headers": [*message["headers"], *self._common_headers()]}
        elif not self._body_complete and self._drains and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._drain()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._send(message)

    def _note_progress(self, size: int, seconds: float) -> None:
        """Note that bytes of the body arrived after a wait. Enough of them give the client the whole time again."""
        self._progress_bytes += size
        self._waited_seconds += seconds
        if self._progress_bytes >= _MIN_BODY_PROGRESS_BYTES:
            self._progress_bytes, self._waited_seconds = 0, 0.0

    async def _next_for_handler(self) -> Message:
        if is_authenticated(self._state):
            return await self._next()
        with self._client_state.waiting_for_body():
            return await self._next()

    async def _next(self) -> Message:
        message = await self._receive()
        if self._client_state.cut_off and message.get("more_body", False):
            message = _DISCONNECT
        self._body_complete = not message.get("more_body", False)
        return message

    async def _drain(self) -> None:
        """Read the rest of the body, within bounds.

        Closing a socket with unread bytes resets the connection, and a client that is still sending never reads the
        answer.
        """
        left, seconds = self._drain_bytes, self._stall_seconds
        if not is_authenticated(self._state):
            seconds = min(seconds, _UNAUTHENTICATED_DRAIN_SECONDS)
        with self._client_state.draining(), suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while left > 0 and not self._body_complete:
                    left -= len((await self._next()).get("body", b""))

    def _common_headers(self) -> list[tuple[bytes, bytes]]:
        headers = self._headers if self._body_complete else self._headers | {"connection": "close"}
        return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]


async def body_chunks(
    request: Request, *, max_bytes: int, too_large: ApiError, cut_off: ApiError
) -> AsyncGenerator[bytes]:
    """Yield the body of a request.

    Raise ``too_large`` as soon as the size is known to exceed ``max_bytes``, which may be before the first byte, and
    ``cut_off`` if the client disconnects before the end.
    """
    if int(request.headers.get("content-length", "0")) > max_bytes:
        raise too_large
    received = 0
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise cut_off
        chunk: bytes = message.get("body", b"")
        received += len(chunk)
        if received > max_bytes:
            raise too_large
        yield chunk
        more = message.get("more_body", False)


def body_size(request: Request) -> int | None:
    """Return the size that the request announces for its body, or None if the body comes in chunks."""
    length = request.headers.get("content-length")
    return None if length is None else int(length)


async def read_body(
    request: Request,
    *,
    max_bytes: int,
    too_large: ApiError,
    cut_off: ApiError,
    on_bytes: Callable[[int], None] | None = None,
) -> bytes:
    """Return the body of a request. Raise like ``body_chunks``.

    ``on_bytes`` is called before bytes are added, with the number of bytes so far. What it raises ends the reading.
    """
    # A BytesIO gives its bytes away without a copy; a list of chunks would be joined into a second one. It is closed,
    # so that the traceback of an error does not hold the bytes while the error is sent.
    with BytesIO() as body:
        async for chunk in body_chunks(request, max_bytes=max_bytes, too_large=too_large, cut_off=cut_off):
            if on_bytes is not None:
                on_bytes(body.tell() + len(chunk))
            body.write(chunk)
        return body.getvalue()
