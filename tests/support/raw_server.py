"""A server that sends exactly the bytes that a test gives it, over real sockets, and a client for it."""

import asyncio
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from socket import SO_LINGER, SOL_SOCKET
from typing import Any

from batchline.domain.held_bytes import HeldBytes
from batchline.ports import Clock
from batchline.system import SystemClock
from batchline.upstream.http import HttpUpstream

KEY = "sk-not-to-be-told"
BODY = b'{"prompt":"not to be told either"}'

Run = Callable[[Coroutine[Any, Any, Any]], Any]
"""Runs a coroutine on an event loop of its own."""


class ManualClock:
    """A clock that only moves when a test moves it, or when something sleeps on it."""

    def __init__(self, now: float = 1_700_000_000) -> None:
        self.seconds = 0.0
        self._start = now

    def now(self) -> float:
        return self._start + self.seconds

    def steady(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.seconds += seconds


class Peer:
    """One accepted connection; ``number`` counts them from 1."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number
        self.reader = reader
        self.writer = writer

    async def request(self) -> bytes:
        """Read one request, head and body."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        return head + await self.reader.readexactly(length)

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def left(self) -> None:
        """Wait until the client has closed its side, or reset it because it had not read everything."""
        with suppress(ConnectionError):
            await self.reader.read()

    def reset(self) -> None:
        """Reset the connection, as happens when a process dies."""
        self.writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


Behaviour = Callable[[Peer], Awaitable[None]]


def sends(*pieces: bytes) -> Behaviour:
    """Answer the only request with these bytes, then close the connection."""

    async def behave(peer: Peer) -> None:
        await peer.request()
        for piece in pieces:
            await peer.send(piece)

    return behave


class Wire:
    """The running server; ``accepted`` counts its connections."""

    def __init__(self, behave: Behaviour) -> None:
        self.accepted = 0
        self.port = 0
        self._behave = behave
        self._handlers: list[asyncio.Task[None]] = []

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._handlers.append(asyncio.create_task(self._handle(Peer(self.accepted, reader, writer))))

    async def _handle(self, peer: Peer) -> None:
        try:
            await self._behave(peer)
        except (ConnectionError, asyncio.IncompleteReadError):
            """The client has closed the connection; the test judges what that means."""
        finally:
            peer.writer.close()

    async def finish(self) -> None:
        """Wait until every connection was served to its end."""
        await asyncio.gather(*self._handlers)


@asynccontextmanager
async def serving(behave: Behaviour, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[Wire]:
    """Run a server that serves each connection with this function."""
    wire = Wire(behave)
    server = await asyncio.start_server(wire.accept, "127.0.0.1", 0, ssl=tls, limit=4 * 1024 * 1024)
    wire.port = server.sockets[0].getsockname()[1]
    try:
        yield wire
    finally:
        server.close()
        await wire.finish()
        await server.wait_closed()


@asynccontextmanager
async def client(
    port: int,
    *,
    url: str = "http://127.0.0.1:{port}/v1",
    api_key: str | None = KEY,
    headers: Mapping[str, str] | None = None,
    connect_timeout: float = 10,
    request_timeout: float = 30,
    max_answer_bytes: int = 1024 * 1024,
    max_idle_seconds: float = 4,
    clock: Clock | None = None,
    held_bytes: HeldBytes | None = None,
) -> AsyncIterator[HttpUpstream]:
    """Open an HTTP client for this port and close it with the block."""
    upstream = HttpUpstream(
        url.format(port=port),
        api_key=api_key,
        headers=headers,
        connect_timeout=connect_timeout,
        request_timeout=request_timeout,
        max_answer_bytes=max_answer_bytes,
        max_idle_seconds=max_idle_seconds,
        clock=clock or SystemClock(),
        held_bytes=held_bytes,
    )
    try:
        yield upstream
    finally:
        await upstream.close()


def answer(body: bytes = b"{}", *headers: str, status: str = "200 OK") -> bytes:
    """Return the bytes of an answer with a Content-Length."""
    fields = "".join(f"{header}\r\n" for header in (f"Content-Length: {len(body)}", *headers))
    return f"HTTP/1.1 {status}\r\n{fields}\r\n".encode() + body


def chunked_with(body: bytes, *headers: str) -> bytes:
    """Return the bytes of an answer in two chunks, with these headers."""
    fields = "".join(f"{header}\r\n" for header in headers).encode()
    middle = len(body) // 2
    return chunked(body[:middle], body[middle:]).replace(b"\r\n\r\n", b"\r\n" + fields + b"\r\n", 1)


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    """Return the bytes of an answer in chunks."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + end
