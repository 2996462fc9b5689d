"""The bytes of a connection: requests one behind the other, cut anywhere, and what a client does meanwhile.

The byte 0xFE ends a read. The byte after it says what happens before the next one: see ``_EVENTS``.
"""

import asyncio
import logging
import random
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, cast

import h11
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from batchline.api import idle_connections, protocol, request_splitter, write_deadline
from batchline.api.auth import Auth
from batchline.api.cors import Cors
from batchline.api.middleware import Middleware
from batchline.api.protocol import ConnectionLimits, ServerConnection, connection_class
from batchline.api.request_context import read_body
from batchline.domain.errors import InvalidRequest, TooLarge
from batchline.domain.ids import key_digest
from batchline.domain.records import Owner
from batchline.ports import Accounts
from batchline.telemetry.metrics import Metrics
from tests.fuzz.mutator import MAX_INPUT_BYTES
from tests.simulation.virtual import SeededRandom
from tests.support.virtual_loop import VirtualLoop

_MARK = b"\xfe"
_SLOW, _SLOW_SECONDS = b"slow", 40.0
_KEY, _PROJECT = "bl-good", "p"
_MAX_CONNECTIONS = 2
_HEAD = re.compile(rb"HTTP/1\.1 [2-5][0-9][0-9] ")
_HEADER_SECONDS, _WRITE_SECONDS = 15.0, 30.0


class _Seen(NamedTuple):
    """A request as the application or another parser read it."""

    method: str
    target: str
    body: bytes
    authorized: bool


class _Accounts:
    """The edge: one key of one project."""

    async def owner_of(self, digest: bytes, project_id: str | None) -> Owner | None:
        if digest != key_digest(_KEY) or project_id not in (None, _PROJECT):
            return None
        return Owner(key_id="k", project_id=_PROJECT, organization_id="o")


class _Transport:
    """The edge: collects what is written, and holds it as unread if the client does not read."""

    def __init__(self) -> None:
        self.written = b""
        self.unread = 0
        self.reads = True
        self.closing = False
        self.on_closed: Callable[[], object] = lambda: None

    def write(self, data: bytes) -> None:
        if not self.closing:
            self.written += data
            self.unread += 0 if self.reads else len(data)

    def writelines(self, parts: Any) -> None:
        self.write(b"".join(parts))

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, _name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        """Close once the client has taken everything."""
        if not self.closing:
            self.closing = True
            if not self.unread:
                self.on_closed()

    def abort(self) -> None:
        self.closing = True
        self.on_closed()

    def take_all(self) -> None:
        """Let the client read everything, and go on reading."""
        self.reads, self.unread = True, 0
        if self.closing:
            self.on_closed()

    def write_eof(self) -> None:
        """The client may still send."""

    def pause_reading(self) -> None:
        """What comes meanwhile is one read at most."""

    def resume_reading(self) -> None:
        """Go on."""


class FramingTarget:
    """Every request is answered once, with its own credentials, and no parser sees other requests in the bytes."""

    name = "framing"
    # Not request_context: what it does with a handler that answers early needs other handlers than the one here.
    modules: tuple[ModuleType, ...] = (protocol, request_splitter, write_deadline, idle_connections)
    seeds: tuple[bytes, ...] = ()
    dictionary: tuple[bytes, ...] = (
        *(
            b"GET /v1/files HTTP/1.1\r\nhost: a\r\n\r\n",
            b"POST /v1/files HTTP/1.1\r\nhost: a\r\n",
            b"\r\n",
            b"\r\n\r\n",
        ),
        *(
            b"x-api-key: bl-good\r\nx-project-id: p\r\n",
            b"authorization: Bearer bl-good\r\n",
            b"content-length: 5\r\n\r\nhello",
        ),
        *(
            b"transfer-encoding: chunked\r\n\r\n",
            b"transfer-encoding: identity\r\n",
            b"5\r\nhello\r\n",
            b"0\r\n\r\n",
            b"0\r\nt: v\r\n\r\n",
        ),
        *(
            b"content-length: 0\r\n",
            b"content-length: 5, 5\r\n",
            b"expect: 100-continue\r\n",
            b"connection: close\r\n",
            b" HTTP/1.0\r\n",
        ),
        *(
            b"connection: upgrade\r\nupgrade: h2c\r\n",
            b"host: b\r\n",
            b" HTTP/0.9\r\n",
            b"HEAD",
            b"OPTIONS",
            b"PRI * HTTP/2.0",
        ),
        *(
            b"\xfep",
            b"\xfer",
            b"\xfee",
            b"\xfet",
            b"\xfen",
            b"\xfeb",
            b"\xfex",
            b"\xfe.",
            b"\x00",
            b"\t",
            b" ",
            b":",
            b"\n",
            b"\r",
            b"a" * 3000,
        ),
        *(b"x: y\r\n" * 40, b"1\r\nx\r\n" * 80, b"/?" + b"a&" * 2000, b"/slow"),
    )

    def __init__(self) -> None:
        logging.getLogger("uvicorn.error").disabled = True
        self._virtual = VirtualLoop()
        self._random = SeededRandom(random.Random(1))
        self._auth = Auth(accounts=cast(Accounts, _Accounts()), bearer=True, metered=False, on_key_used=lambda _: None)
        self._seen: list[_Seen] = []
        middleware = Middleware(
            self._handle,
            cors=Cors(origins=("*",)),
            clock=self._virtual.clock,
            random=self._random,
            metrics=Metrics(),
            stall_seconds=30.0,
            drain_bytes=MAX_INPUT_BYTES,
            route_names={},
        )
        limits = ConnectionLimits(
            header_seconds=_HEADER_SECONDS, write_seconds=_WRITE_SECONDS, connections=_MAX_CONNECTIONS
        )
        self._class = connection_class(limits=limits, metrics=Metrics(), random=self._random)
        self._config = uvicorn.Config(
            middleware,
            loop="none",
            http=self._class,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
        )
        self._config.load()

    def run(self, data: bytes) -> None:
        self._seen = []
        state = ServerState()
        connection, transport = self._connect(state)
        pieces = data.split(_MARK)
        self._feed(connection, transport, pieces[0])
        disturbed = False
        for piece in pieces[1:]:
            event = _EVENTS.get(piece[:1])
            if event is not None:
                disturbed = True
                event(self, connection, transport, state)
            self._feed(connection, transport, piece[1:])
        self._virtual.advance(0)
        assert len(connection._unparsed) <= 64 * 1024 + len(data)
        seen = list(self._seen)
        self._end(connection, transport, state)
        heads = len(_HEAD.findall(transport.written))
        assert heads == transport.written.count(b"\r\nx-request-id: req_"), transport.written
        if not disturbed:
            expected, refused = _requests_by_h11(b"".join([pieces[0], *(piece[1:] for piece in pieces[1:])]))
            _compare(seen, expected, refused=refused)

    def close(self) -> None:
        logging.getLogger("uvicorn.error").disabled = False
        self._virtual.close()

    def _connect(self, state: ServerState) -> tuple[ServerConnection, _Transport]:
        made: list[ServerConnection] = []
        transport = _Transport()

        def connect() -> None:
            new = cast(Any, self._class)(self._config, state, {}, _loop=self._virtual.loop)
            made.append(new)
            transport.on_closed = lambda: self._virtual.loop.call_soon(self._lose, new)
            new.connection_made(cast(asyncio.Transport, transport))

        self._virtual.call(connect)
        return made[0], transport

    def _lose(self, connection: ServerConnection) -> None:
        if connection in connection.connections:
            connection.connection_lost(None)

    def _feed(self, connection: ServerConnection, transport: _Transport, piece: bytes) -> None:
        if piece and not transport.closing:
            self._virtual.call(lambda: connection.data_received(piece))

    def _end(self, connection: ServerConnection, transport: _Transport, state: ServerState) -> None:
        self._virtual.call(transport.abort)
        for other in list(state.connections):
            self._virtual.call(other.transport.abort)
        self._virtual.advance(100)
        assert not state.connections
        assert not state.tasks, "a request goes on without its connection"
        assert connection._timer is None

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body = await read_body(
            request, max_bytes=MAX_INPUT_BYTES, too_large=TooLarge("large"), cut_off=InvalidRequest("cut off")
        )
        if _SLOW in scope["raw_path"]:
            await asyncio.sleep(_SLOW_SECONDS)
        target = scope["raw_path"].decode("latin-1")
        if scope["query_string"]:
            target += "?" + scope["query_string"].decode("latin-1")
        try:
            await self._auth.owner(request)
            authorized = True
        except Exception:
            authorized = False
            raise
        finally:
            self._seen.append(_Seen(request.method, target, body, authorized))
        await Response(b"ok")(scope, receive, send)

    def on_pause(self, connection: ServerConnection, transport: _Transport, _state: ServerState) -> None:
        transport.reads = False
        if transport.unread and not transport.closing:
            self._virtual.call(connection.pause_writing)

    def on_resume(self, connection: ServerConnection, transport: _Transport, _state: ServerState) -> None:
        transport.take_all()
        if not transport.closing:
            self._virtual.call(connection.resume_writing)

    def on_eof(self, connection: ServerConnection, transport: _Transport, _state: ServerState) -> None:
        def end() -> None:
            if not transport.closing and not connection.eof_received():
                transport.close()

        self._virtual.call(end)

    def on_wait(self, _connection: ServerConnection, _transport: _Transport, _state: ServerState) -> None:
        self._virtual.advance(20)

    def on_newcomer(self, _connection: ServerConnection, _transport: _Transport, state: ServerState) -> None:
        self._connect(state)

    def on_busy_newcomer(self, _connection: ServerConnection, _transport: _Transport, state: ServerState) -> None:
        self._feed(*self._connect(state), b"GET /" + _SLOW + b" HTTP/1.1\r\nhost: a\r\n\r\n")

    def on_loss(self, _connection: ServerConnection, transport: _Transport, _state: ServerState) -> None:
        self._virtual.call(transport.abort)


_EVENTS: dict[bytes, Callable[[FramingTarget, ServerConnection, _Transport, ServerState], None]] = {
    b"p": FramingTarget.on_pause,
    b"r": FramingTarget.on_resume,
    b"e": FramingTarget.on_eof,
    b"t": FramingTarget.on_wait,
    b"n": FramingTarget.on_newcomer,
    b"b": FramingTarget.on_busy_newcomer,
    b"x": FramingTarget.on_loss,
}


def _compare(seen: list[_Seen], expected: list[_Seen], *, refused: bool) -> None:
    """Compare what both parsers read. The service may stop earlier; the other parser may if it ``refused`` the rest.

    A request that only the service sees, in bytes that the other parser read to the end, would be a smuggled one.
    """
    assert refused or len(seen) <= len(expected), seen[len(expected) :]
    for ours, theirs in zip(seen, expected, strict=False):
        assert (ours.method, ours.body, ours.authorized) == (theirs.method, theirs.body, theirs.authorized)
        if theirs.target.startswith("/") and "#" not in theirs.target:
            assert ours.target.rstrip("?") == theirs.target.rstrip("?")


def _requests_by_h11(data: bytes) -> tuple[list[_Seen], bool]:
    """Return the requests that another parser reads, and whether it refused what comes after them."""
    connection, found = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_INPUT_BYTES * 2), []
    connection.receive_data(data)
    try:
        while (request := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            body = b""
            while isinstance(part := connection.next_event(), h11.Data):
                body += part.data
            if not isinstance(request, h11.Request) or not isinstance(part, h11.EndOfMessage):
                break
            found.append(_Seen(request.method.decode(), request.target.decode("latin-1"), body, _authorized(request)))
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            connection.start_next_cycle()
    except h11.LocalProtocolError:
        pass  # The connection ends with the last request.
    except (h11.RemoteProtocolError, UnicodeDecodeError):
        return found, True
    return found, False


def _authorized(request: h11.Request) -> bool:
    def header(name: bytes) -> str:
        return ", ".join(value.decode("latin-1") for key, value in request.headers if key == name)

    named = {key for key, _ in request.headers}
    if named & {b"x-api-key", b"x-project-id"}:
        return header(b"x-api-key") == _KEY and header(b"x-project-id").lower() == _PROJECT
    scheme, _, token = header(b"authorization").partition(" ")
    return scheme.lower() == "bearer" and token.strip() == _KEY
