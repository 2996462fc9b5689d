"""The answer of an upstream that streams, from its status line on."""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple, cast
from zlib import crc32

from batchline.domain import events
from batchline.domain.errors import BadGateway, StreamBroken
from batchline.domain.events import Chunk, EventReader, error_event, read_chat_event, read_response_event
from batchline.domain.held_bytes import HeldBytes
from batchline.domain.replies import Answer
from batchline.domain.usage import NOTHING, Usage
from batchline.ports import Clock
from batchline.upstream import encoding, streaming
from batchline.upstream.connection import UpstreamConnection, UpstreamExchange
from batchline.upstream.streaming import EventStream
from tests.fuzz.targets.cuts import pieces_of
from tests.support.virtual_loop import VirtualLoop

_MAX_ANSWER_BYTES = 20_000
_MAX_EVENT_BYTES = 20_000
_FRAME = b"data: \n\n"
_STALL_SECONDS = 30.0


class _Transport:
    """The edge: takes what is written and notes whether it is closed."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.aborted = False

    def get_extra_info(self, _name: str) -> socket.socket:
        return self._sock

    def writelines(self, _parts: Any) -> None:
        """Send nothing: the answer is the input."""

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        """Go on: all the bytes are there already."""

    def resume_reading(self) -> None:
        """Go on."""


class EventStreamTarget:
    """An answer is an Answer, a Fault or a stream, whatever the bytes are, and is read alike however it is cut."""

    name = "sse"
    # Not the connection itself: its reservations, timers and sockets are tested in tests/upstream.
    modules: tuple[ModuleType, ...] = (events, streaming, encoding)
    seeds: tuple[bytes, ...] = ()
    dictionary: tuple[bytes, ...] = (
        *(
            b"HTTP/1.1 200 OK\r\n",
            b"content-type: text/event-stream\r\n",
            b"transfer-encoding: chunked\r\n",
            b"\r\n\r\n",
        ),
        *(b"content-length: 5\r\n", b"content-encoding: gzip\r\n", b"retry-after: 1\r\n", b"connection: close\r\n"),
        *(
            b"x-ratelimit-remaining-requests: 0\r\n",
            b"x-ratelimit-reset-requests: 1s\r\n",
            b"0\r\n\r\n",
            b"5\r\nhello\r\n",
        ),
        *(
            b"data: ",
            b"data:",
            b"\n\n",
            b"\r\n",
            b"\r",
            b"\n",
            b"data: [DONE]\n\n",
            b": comment\n",
            b"event: e\n",
            b"id: 1\n",
        ),
        *(
            b'{"choices":[{"delta":{"content":"hi","role":"assistant"}}]}',
            b'"usage":{"prompt_tokens":1,"completion_tokens":2}',
        ),
        *(
            b'{"choices":[],"usage":{"input_tokens":1,"output_tokens":2}}',
            b'"system_fingerprint":"x"',
            b'"error":{}',
            b"[",
            b"{",
        ),
        *(
            b'{"type":"response.output_text.delta","delta":"hi"}',
            b'"response":{"usage":{}}',
            b"\xff",
            b"\\ud800",
            b"null",
            b"}",
        ),
    )

    def __init__(self) -> None:
        self._virtual = VirtualLoop()
        self._socket, self._peer = socket.socketpair()
        # A smaller bound is reached by smaller inputs.
        self._real_bound, events.MAX_EVENT_BYTES = events.MAX_EVENT_BYTES, _MAX_EVENT_BYTES

    def run(self, data: bytes) -> None:
        # Some servers stay silent at the end and do not close, until the time is over.
        closes = crc32(data) % 4 > 0
        whole = self._virtual.run(self._answer([data], closes=closes))
        cut = self._virtual.run(self._answer(list(pieces_of(data)), closes=closes))
        assert whole == cut, (whole, cut)
        _, _, body = data.partition(b"\r\n\r\n")
        for read in (read_chat_event, read_response_event):
            assert _passed(read, [body]) == _passed(read, list(pieces_of(body)))

    def close(self) -> None:
        self._virtual.close()
        self._socket.close()
        self._peer.close()
        events.MAX_EVENT_BYTES = self._real_bound

    async def _answer(self, pieces: list[bytes], *, closes: bool) -> object:
        """Return what an exchange gives for an answer in these pieces, after which the server closes or is silent."""
        transport = _Transport(self._socket)
        idle: deque[UpstreamConnection] = deque()
        upstream = UpstreamConnection(
            clock=cast(Clock, self._virtual.clock),
            max_answer_bytes=_MAX_ANSWER_BYTES,
            held_bytes=HeldBytes(1 << 30),
            idle=idle,
        )
        upstream.connection_made(cast(asyncio.Transport, transport))
        exchange = UpstreamExchange()
        stream = EventStream(stall_seconds=_STALL_SECONDS)
        exchange.request, exchange.started, exchange.events = (b"",), 0.0, stream
        upstream.send(exchange, timeout=60)
        reading = asyncio.get_running_loop().create_task(self._read(exchange, stream))
        for piece in pieces:
            await asyncio.sleep(0)
            if not transport.aborted:
                upstream.data_received(piece)
        if closes:
            upstream.connection_lost(None)
        outcome = await reading
        stream.abandon()
        if not closes:
            upstream.connection_lost(None)
        return outcome

    async def _read(self, exchange: UpstreamExchange, stream: EventStream) -> object:
        reply = await exchange
        if not stream.begun:
            return (
                (type(reply).__name__, reply.status, reply.body) if isinstance(reply, Answer) else type(reply).__name__
            )
        received = b""
        try:
            async for part in stream:
                received += part
        except StreamBroken:
            return "broken", received
        return "whole", received


class _Passed(NamedTuple):
    """What a client gets of a stream, and what is counted."""

    text: bytes
    """All events without their line ends: one that is cut after its CR ends there, and the LF begins the next one."""
    usages: list[Usage]
    text_tokens: int


def _passed(read: Callable[[bytes], Chunk], pieces: list[bytes]) -> _Passed:
    reader = EventReader()
    found: list[Chunk] = []
    try:
        found.extend(_checked(read(event)) for event in chain.from_iterable([*map(reader.feed, pieces), reader.end()]))
    except StreamBroken:
        found.append(Chunk(event=error_event(BadGateway("broken"))))
    return _Passed(
        b"".join(chunk.event for chunk in found).translate(None, b"\r\n"),
        [chunk.usage for chunk in found if chunk.usage != NOTHING],
        sum(chunk.text_tokens for chunk in found),
    )


def _checked(chunk: Chunk) -> Chunk:
    assert len(chunk.event) <= 6 * _MAX_EVENT_BYTES + len(_FRAME)
    assert chunk.event.endswith((b"\n\n", b"\r\r", b"\r\n\r\n", b"\n\r\n", b"\r\n\n", b"\n\r", b"\r\n\r", b"\r\n"))
    assert chunk.text_tokens >= 0
    assert chunk.usage.input_tokens >= 0
    assert chunk.usage.output_tokens >= 0
    return chunk
