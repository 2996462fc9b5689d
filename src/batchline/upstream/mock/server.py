"""Serves the mock upstream over HTTP, to test any client of an OpenAI-style API.

``POST /v1/chat/completions``, ``/v1/responses`` (both also as streams), ``/v1/embeddings``, ``/summary``,
``/usecase/classify/iab`` and ``/gliner`` answer as the script decides; ``GET /v1/models`` lists one model.
``GET /stats`` reports the requests so far. ``POST /script`` replaces the whole plan with one in JSON, such as
``{"status": {"503": 5}, "cut": 1, "delay": 0.02}``.

If a kept-alive connection is closed before the first byte of an answer, a client may send the request again. So the
script may count a ``drop`` twice while the client's caller does not see it at all.
"""

import asyncio
import os
from collections import Counter, deque
from collections.abc import Callable
from http import HTTPStatus
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from msgspec import DecodeError, Struct
from msgspec.json import Decoder, encode

from batchline.upstream.mock.answers import error_body, model_list
from batchline.upstream.mock.script import Ending, Plan, Script, ScriptedOutcome

MAX_BODY_BYTES = 4 * 1024 * 1024
CRASH_EXIT_CODE = 70
_BACKLOG = 1024
"""Connections that may wait to be accepted: as many as a worker may open at once."""

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_PLANS = Decoder(Plan)


class MockServer:
    """A running mock server; ``serve_mock`` starts one."""

    def __init__(self, script: Script, on_crash: Callable[[], None]) -> None:
        self.script = script
        self.on_crash = on_crash
        self.stats = _Stats()
        self.connections: set[_Connection] = set()

    async def listen(self, host: str, port: int) -> None:
        """Start to accept connections, and set ``port`` and ``base_url``."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self), host, port, backlog=_BACKLOG
        )
        self.port = int(self._server.sockets[0].getsockname()[1])
        self.base_url = f"http://{f'[{host}]' if ':' in host else host}:{self.port}/v1"

    async def close(self) -> None:
        """Stop listening and close every connection at once."""
        self._server.close()
        for connection in self.connections:
            connection.drop()
        await self._server.wait_closed()

    def control(self, request: "_Request") -> ScriptedOutcome | None:
        """Return the answer to a request that the script does not decide, or None if it does."""
        match request.method, request.path:
            case b"GET", "/stats":
                return ScriptedOutcome(body=encode(self.stats.document(self.script)))
            case b"GET", "/v1/models":
                return ScriptedOutcome(body=model_list())
            case b"POST", "/script":
                return self._change_plan(request.body)
            case b"POST", _:
                return None
        return ScriptedOutcome(
            status=404, body=error_body(404, f"the mock upstream does not serve {request.path[:100]}")
        )

    def _change_plan(self, body: bytes) -> ScriptedOutcome:
        try:
            self.script.follow(_PLANS.decode(body))
        except (DecodeError, UnicodeDecodeError, RecursionError) as error:
            return ScriptedOutcome(status=400, body=error_body(400, str(error)))
        self.stats.peak_in_flight = self.stats.in_flight
        return ScriptedOutcome(body=encode(self.script.plan))


async def serve_mock(
    *, host: str, port: int, script: Script, on_crash: Callable[[], None] = lambda: os._exit(CRASH_EXIT_CODE)
) -> MockServer:
    """Start a server and return it; with port 0 it takes a free port, see its ``port`` and ``base_url``."""
    server = MockServer(script, on_crash)
    await server.listen(host, port)
    return server


class _Stats:
    def __init__(self) -> None:
        self.requests = 0
        self.in_flight = 0
        self.peak_in_flight = 0
        self.endings: Counter[str] = Counter()

    def begin(self) -> None:
        self.requests += 1
        self.in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self.in_flight)

    def end(self, ending: str) -> None:
        self.in_flight -= 1
        self.endings[ending] += 1

    def document(self, script: Script) -> dict[str, object]:
        return {
            "requests": self.requests,
            "in_flight": self.in_flight,
            "peak_in_flight": self.peak_in_flight,
            "distinct": len(script.tries),
            "repeated": sum(count > 1 for count in script.tries.values()),
            "requests_by_status": self.endings,
        }


class _Request(Struct):
    method: bytes
    path: str
    body: bytes
    keep_alive: bool


class _Connection(asyncio.Protocol):
    """One client's connection; its requests are served one after the other, in the order they arrived."""

    def __init__(self, server: MockServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._parser = HttpRequestParser(self)
        self._waiting: deque[_Request] = deque()
        self._current: _Request | None = None
        self._in_flight = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._count_end("left")

    def drop(self) -> None:
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade):
            self._reject(400, "not an HTTP request")
        self._serve_waiting()

    def on_message_begin(self) -> None:
        self._url = b""
        self._body = bytearray()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_body(self, data: bytes) -> None:
        # Bytes over the limit are read and discarded: a client that is cut off while it sends its body never sees the
        # answer that gives the reason.
        if len(self._body) <= MAX_BODY_BYTES:
            self._body += data

    def on_message_complete(self) -> None:
        if len(self._body) > MAX_BODY_BYTES:
            self._reject(413, f"body over {MAX_BODY_BYTES} bytes")
            return
        self._waiting.append(
            _Request(
                method=self._parser.get_method(),
                path=self._url.decode("latin-1").partition("?")[0],
                body=bytes(self._body),
                keep_alive=self._parser.should_keep_alive(),
            )
        )

    def _serve_waiting(self) -> None:
        while self._waiting and self._current is None and not self._transport.is_closing():
            self._current = self._waiting.popleft()
            self._serve(self._current)

    def _serve(self, request: _Request) -> None:
        answer = self._server.control(request)
        if answer is not None:
            self._send(answer)
            return
        self._server.stats.begin()
        self._in_flight = True
        outcome = self._server.script.decide(request.path, request.body)
        if outcome.delay > 0:
            self._timer = self._loop.call_later(outcome.delay, self._perform_delayed, outcome)
        else:
            self._perform(outcome)

    def _perform_delayed(self, outcome: ScriptedOutcome) -> None:
        self._perform(outcome)
        self._serve_waiting()

    def _perform(self, outcome: ScriptedOutcome) -> None:
        match outcome.ending:
            case Ending.WHOLE if outcome.events:
                self._begin_events(outcome, outcome.events)
            case Ending.CUT if outcome.events:
                self._begin_events(outcome, outcome.events[: len(outcome.events) // 2])
            case Ending.WHOLE:
                self._count_end(str(outcome.status))
                self._send(outcome)
            case Ending.CUT:
                self._count_end("cut")
                self._transport.write(_head(outcome) + outcome.body[: len(outcome.body) // 2])
                self._transport.close()
            case Ending.DROP:
                self._count_end("drop")
                self.drop()
            case Ending.CRASH:
                self._count_end("crash")
                self._server.on_crash()
                self.drop()
            case Ending.HANG:
                pass

    def _begin_events(self, outcome: ScriptedOutcome, events: tuple[bytes, ...]) -> None:
        self._transport.write(_head(outcome))
        self._send_events(outcome, deque(events))

    def _send_events(self, outcome: ScriptedOutcome, events: deque[bytes]) -> None:
        """Send the events one after the other, with the pause that the prompt asks for."""
        while events:
            event = events.popleft()
            self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
            if events and outcome.pause > 0:
                self._timer = self._loop.call_later(outcome.pause, self._continue_events, outcome, events)
                return
        self._end_events(outcome)

    def _continue_events(self, outcome: ScriptedOutcome, events: deque[bytes]) -> None:
        self._send_events(outcome, events)
        self._serve_waiting()

    def _end_events(self, outcome: ScriptedOutcome) -> None:
        if outcome.ending is Ending.CUT:
            self._count_end("cut")
            self._transport.close()
        else:
            self._count_end(str(outcome.status))
            self._transport.write(b"0\r\n\r\n")
            self._finish()

    def _count_end(self, ending: str) -> None:
        if self._in_flight:
            self._in_flight = False
            self._server.stats.end(ending)

    def _send(self, outcome: ScriptedOutcome) -> None:
        self._transport.write(_head(outcome) + outcome.body)
        self._finish()

    def _finish(self) -> None:
        if self._current is None or not self._current.keep_alive:
            self._transport.close()
        self._current = None

    def _reject(self, status: int, message: str) -> None:
        """Answer bytes that are no valid request with an error, and close the connection."""
        if not self._transport.is_closing():
            self._waiting.clear()
            self._current = None
            self._send(ScriptedOutcome(status=status, body=error_body(status, message)))


def _head(outcome: ScriptedOutcome) -> bytes:
    optional = (
        ("X-Request-Id", outcome.request_id),
        ("Retry-After", None if outcome.retry_after is None else f"{outcome.retry_after:g}"),
        ("Location", outcome.location),
    )
    fields = "".join(f"{name}: {value}\r\n" for name, value in optional if value is not None)
    phrase = _PHRASES.get(outcome.status, "Scripted")
    head = f"HTTP/1.1 {outcome.status} {phrase}\r\nContent-Type: {outcome.content_type}\r\n"
    return f"{head}{_framing(outcome)}{fields}\r\n".encode()


def _framing(outcome: ScriptedOutcome) -> str:
    if outcome.events:
        return "Transfer-Encoding: chunked\r\n"
    return "" if outcome.status in {204, 304} else f"Content-Length: {len(outcome.body)}\r\n"
