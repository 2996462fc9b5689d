"""Extends uvicorn's HTTP connection with bounds on what a client can make it hold, and errors in the envelope.

uvicorn has no setting for these. The subclass overrides private parts (``cycle``, ``flow``,
``_unsupported_upgrade_warning``, ``STATUS_LINE``), so uvicorn is pinned to <0.55.

A connection works on one request at a time. The bytes of later requests are kept unparsed: at most
``_READ_AHEAD_BYTES`` and what one read from the socket returns. Then reading pauses until the answer was sent and the
client has read enough of it.
"""

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from msgspec.json import encode as encode_json
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from batchline.api.idle_connections import IdleConnections
from batchline.api.request_context import ClientState, is_authenticated
from batchline.api.request_splitter import RequestSplitter
from batchline.api.responses import JSON
from batchline.api.write_deadline import WriteDeadline
from batchline.domain import ids
from batchline.domain.errors import (
    ApiError,
    HeadersTooLarge,
    InvalidRequest,
    RequestTimeout,
    TooManyConnections,
    UrlTooLong,
)
from batchline.domain.limits import MAX_HEADER_BYTES, MAX_HEADERS, MAX_QUERY_PARAMETERS, MAX_URL_BYTES
from batchline.domain.wire import ErrorBody
from batchline.ports import Random
from batchline.telemetry.metrics import Metrics

_LINGER_SECONDS = 5.0
"""The time that a client has to read an error before its connection is closed."""
_HOST_LENGTH = 4
_READ_AHEAD_BYTES = 64 * 1024
_MAX_BODY_PARTS_AT_ONCE = 256
"""After so many parts of a body the other connections get their turn. Only a client that sends tiny chunks has more."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """The bounds of every connection."""

    header_seconds: float
    write_seconds: float
    connections: float
    """The most connections that may be open at once."""


class _Flow(FlowControl):
    """Flow control that does not resume reading while more than ``_READ_AHEAD_BYTES`` are unparsed."""

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__(transport)
        self.read_ahead_full = False

    def resume_reading(self) -> None:
        if not self.read_ahead_full:
            super().resume_reading()


class ServerConnection(HttpToolsProtocol):
    """One connection. Use ``connection_class``, which binds the attributes below: uvicorn creates the instances."""

    limits: ConnectionLimits
    metrics: Metrics
    random: Random
    idle: IdleConnections
    flow: _Flow
    _deadline: WriteDeadline

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._client_state = ClientState()
        self._client_state.on_body_wait = self._on_body_wait
        self._splitter = RequestSplitter()
        self._timer: asyncio.TimerHandle | None = None
        self._parse_error: ApiError | None = None
        self._refused = False
        self._in_headers = True
        self._header_bytes = 0
        self._header_count = 0
        self._hosts = 0
        self._buffered_bytes = 0
        """Bytes received since the parser last called back; it buffers all of them."""
        self._body_parts = 0
        self._unparsed = b""
        self._parsed_bytes = 0
        """The number of bytes at the beginning of ``_unparsed`` that the parser has had already."""
        self._parse_is_due = False
        self._unread_is_authenticated = False
        """Whether unread bytes may belong to a complete answer to an authenticated request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self._deadline = WriteDeadline(
            transport, seconds=self.limits.write_seconds, loop=self.loop, on_expired=self._on_unread
        )
        if len(self.connections) > self.limits.connections and not self.idle.make_room():
            self._turn_away()
        else:
            self._start_timer()
            self.idle.add(self, answered=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._deadline.stop()
        self._client_state.stop_notifying()
        self.idle.remove(self)
        self._unparsed = b""
        self._client_state.disconnected = self._in_flight()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        self._client_state.closing = True
        super().shutdown()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_headers:
            self._start_timer()
        if self._unparsed:
            self._unparsed = self._unparsed[self._parsed_bytes :] + data
            self._parsed_bytes = 0
            self._bound_read_ahead()
        else:
            self._unparsed = data
            self._parse()
            if self._splitter.in_request:
                self._parse_soon()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Close the connection, unless the client stopped in the middle of a body: then it may wait for the error."""
        if not self._in_flight() or not self.cycle.more_body:
            return None
        self._cut_off()
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._deadline.start()
        if not self._serves_authenticated():
            self.idle.add_unauthenticated(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._deadline.note_progress()
        self._parse_soon()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["client_state"] = self._client_state
        self._header_bytes = self._header_count = self._hosts = 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > MAX_URL_BYTES:
            self._fail(UrlTooLong())

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header and its bytes. Trailers arrive here too; they are counted and dropped."""
        self._header_count += 1
        self._header_bytes += len(name) + len(value)
        if self._header_bytes + len(self.url) > MAX_HEADER_BYTES or self._header_count > MAX_HEADERS:
            self._fail(HeadersTooLarge())
        if self._in_headers:
            # The parser removes blanks around a value, but no tab behind it.
            super().on_header(name, value.rstrip(b"\t "))
            if len(name) == _HOST_LENGTH and name.lower() == b"host":
                self._hosts += 1

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._buffered_bytes = 0
        self._stop_timer()
        self.idle.remove(self)
        if not self.transport.get_write_buffer_size():
            self._unread_is_authenticated = False
        self._check_head()
        self._splitter.begin_body(length=self._body_length())
        if self.parser.should_upgrade() and self._splitter.body_bytes != 0:
            # The parser treats what follows as another protocol, so the body would be lost silently.
            self._fail(InvalidRequest("Only HTTP/1.1 is spoken here: send the request without an Upgrade header"))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._buffered_bytes = 0
        self._body_parts += 1
        if self._splitter.body_bytes is not None:
            self._splitter.body_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_headers = True
        self._buffered_bytes = 0
        self._splitter.end_request()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.get_write_buffer_size():
            self._deadline.start()
            self._unread_is_authenticated |= is_authenticated(self.cycle.scope["state"])
        self._note_idle(answered=True)
        self._parse_soon()

    def _parse(self) -> None:
        """Parse the bytes that were received, up to the end of a request that has to be answered first."""
        data, splitter = self._unparsed, self._splitter
        self._body_parts = 0
        start = splitter.skip_line_ends(data, self._parsed_bytes)
        while start < len(data) and self._body_parts <= _MAX_BODY_PARTS_AT_ONCE and self._may_parse():
            end = splitter.end_of_piece(data, start)
            self._buffered_bytes += end - start
            super().data_received(data if end - start == len(data) else memoryview(data)[start:end])  # type: ignore[arg-type]
            if self._buffered_bytes > MAX_HEADER_BYTES and not self._refused:
                self._refuse(HeadersTooLarge())
            start = splitter.skip_line_ends(data, end)
        if start < len(data) and not self._refused:
            self._parsed_bytes = start
        else:
            self._unparsed, self._parsed_bytes = b"", 0
        self._bound_read_ahead()

    def _may_parse(self) -> bool:
        if self._refused or self.transport.is_closing():
            return False
        if self._splitter.in_request:
            return True
        return not self._in_flight() and not self.flow.write_paused

    def _parse_soon(self) -> None:
        """Parse the next request when the other connections had their turn."""
        if self._unparsed and not self._parse_is_due:
            self._parse_is_due = True
            self.loop.call_soon(self._parse_when_due)

    def _parse_when_due(self) -> None:
        self._parse_is_due = False
        if self._unparsed:
            self._parse()
            if self._splitter.in_request:
                self._parse_soon()

    def _bound_read_ahead(self) -> None:
        """Stop reading while more than ``_READ_AHEAD_BYTES`` are unparsed."""
        self.flow.read_ahead_full = len(self._unparsed) - self._parsed_bytes > _READ_AHEAD_BYTES
        if self.flow.read_ahead_full:
            self.flow.pause_reading()
        elif self.flow.read_paused and (self.cycle is None or len(self.cycle.body) <= HIGH_WATER_LIMIT):
            self.flow.resume_reading()

    def _on_unread(self) -> None:
        """Disconnect a client that does not read; ``connection_lost`` then notifies the handler of its request."""
        self.metrics.refusals.labels("unread_answer").inc()
        log.info("the client does not read its answer, closing the connection", extra={"client": self.client})
        self.transport.abort()

    def _on_body_wait(self) -> None:
        """Note that the request in flight waits for a body which it does not need, or which nobody authenticated."""
        if self._client_state.only_drains:
            self._note_idle(answered=is_authenticated(self.cycle.scope["state"]))
        else:
            self.idle.add_unauthenticated(self)

    def _note_idle(self, *, answered: bool) -> None:
        """Note that the connection waits for its client, which may have to read answers first."""
        if self.transport.get_write_buffer_size() and not self._serves_authenticated():
            self.idle.add_unauthenticated(self)
        elif not self.transport.is_closing():
            self.idle.add(self, answered=answered)

    def _serves_authenticated(self) -> bool:
        """Return whether an authenticated request is in flight, or its answer may be unread."""
        return self._unread_is_authenticated or (self._in_flight() and is_authenticated(self.cycle.scope["state"]))

    def give_way(self) -> bool:
        """Close the connection and return True; return False if it still holds something for its client.

        A request in flight, unread answers and bytes that were not parsed count, but not the answers of a client
        without a valid key, nor a body that it does not send, nor the rest of a body after the answer.
        """
        if not self._can_give_way():
            return False
        self.idle.remove(self)
        self.metrics.refusals.labels("idle_connections").inc()
        self.transport.abort()
        return True

    def _can_give_way(self) -> bool:
        if self.transport.get_write_buffer_size():
            return not self._serves_authenticated()
        if self._in_flight():
            return self._client_state.only_drains or self._client_state.waits_for_body
        receives_body = not self._in_headers and not self._refused
        return not receives_body and not self._unparsed

    def _turn_away(self) -> None:
        """Refuse a connection for which there is no room, at once: it must not hold a descriptor for long."""
        self.metrics.refusals.labels("connections").inc()
        self._refused = True
        self.transport.write(self._raw_response(TooManyConnections(), ids.request_id(self.random.bytes(16))))
        self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._parse_error or InvalidRequest(msg))

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: an upgrade is an offer, and the service ignores it."""

    def _fail(self, error: ApiError) -> None:
        """Stop the parser from one of its callbacks, by raising the error that the client gets."""
        self._parse_error = error
        raise error

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error and close, or cut off the request in flight if there is one."""
        self._refused = True
        self._stop_timer()
        if self._in_flight():
            self._cut_off()
            return
        request_id = ids.request_id(self.random.bytes(16))
        log.info("invalid request, closing the connection", extra={"status": error.status, "request_id": request_id})
        self.transport.write(self._raw_response(error, request_id))
        self._linger()

    def _linger(self) -> None:
        """Close after a delay.

        Closing with unread bytes would reset the connection before the client has read the error.
        """
        self.flow.resume_reading()
        self.transport.write_eof()
        self._note_idle(answered=False)
        self._timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)
        self._deadline.start()

    def _cut_off(self) -> None:
        """Let the request in flight have its answer, as the last one: the bytes after it cannot be read."""
        self._client_state.cut_off = True
        self.cycle.keep_alive = False
        self.cycle.message_event.set()

    def _in_flight(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _check_head(self) -> None:
        """Refuse a request that a proxy in front of the service could have read in another way."""
        if self.parser.get_http_version() not in {"1.0", "1.1"}:
            self._fail(InvalidRequest("Only HTTP/1.0 and HTTP/1.1 are spoken here"))
        if self._hosts > 1:
            self._fail(InvalidRequest("The request has more than one Host header"))
        if not self._hosts and self.parser.get_http_version() == "1.1":
            self._fail(InvalidRequest("The request has no Host header"))
        if self.url.count(b"&") >= MAX_QUERY_PARAMETERS:
            self._fail(InvalidRequest(f"The request's URL has more than {MAX_QUERY_PARAMETERS} parameters"))

    def _body_length(self) -> int | None:
        """Return the length of the body, or None if it is chunked. The parser has checked these headers."""
        headers = dict(self.headers)
        return None if b"transfer-encoding" in headers else int(headers.get(b"content-length", b"0"))

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.limits.header_seconds, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        """Answer with 408.

        Headers may have to wait for the answer to the request before them; that is not the client's fault.
        """
        self._timer = None
        if self._in_flight() or self._unparsed:
            self._start_timer()
        else:
            seconds = self.limits.header_seconds
            self._refuse(RequestTimeout(f"The request's headers took longer than {seconds:g} seconds"))

    def _raw_response(self, error: ApiError, request_id: str) -> bytes:
        body = encode_json(ErrorBody.from_error(error))
        headers = [
            *self.server_state.default_headers,
            (b"content-type", JSON.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
            (b"connection", b"close"),
            *((name.encode(), value.encode()) for name, value in error.headers.items()),
        ]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body])


def connection_class(*, limits: ConnectionLimits, metrics: Metrics, random: Random) -> type[asyncio.Protocol]:
    """Return a subclass with its settings bound, for uvicorn to instantiate."""
    return type(
        "BoundConnection",
        (ServerConnection,),
        {"limits": limits, "metrics": metrics, "random": random, "idle": IdleConnections()},
    )
