"""Extends uvicorn's HTTP connection with a deadline and a size limit for headers, and errors in the envelope.

uvicorn has no setting for these. The subclass overrides private parts (``cycle``, ``flow``,
``_unsupported_upgrade_warning``, ``STATUS_LINE``), so uvicorn is pinned to <0.55.
"""

import asyncio
import logging
from typing import Any

from msgspec.json import encode as encode_json
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from batchline.api.request_context import ClientState
from batchline.api.responses import JSON
from batchline.domain import ids
from batchline.domain.errors import ApiError, HeadersTooLarge, InvalidRequest, RequestTimeout
from batchline.domain.limits import MAX_HEADER_BYTES
from batchline.domain.wire import ErrorBody
from batchline.ports import Random

_LINGER_SECONDS = 5.0

log = logging.getLogger(__name__)


class ServerConnection(HttpToolsProtocol):
    """One connection. Use ``connection_class``, which binds the two attributes below: uvicorn creates the instances."""

    header_seconds: float
    random: Random

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._client_state = ClientState()
        self._timer: asyncio.TimerHandle | None = None
        self._parse_error: ApiError | None = None
        self._refused = False
        self._in_headers = True
        self._header_bytes = 0
        self._buffered_bytes = 0
        """Bytes received since the parser last called back; it buffers all of them."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._client_state.disconnected = self._in_flight()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_headers:
            self._start_timer()
        self._buffered_bytes += len(data)
        super().data_received(data)
        if self._buffered_bytes > MAX_HEADER_BYTES and not self._refused:
            self._refuse(HeadersTooLarge())

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Close the connection, unless the client stopped in the middle of a body: then it may wait for the error."""
        if not self._in_flight() or not self.cycle.more_body:
            return None
        self._cut_off()
        return True

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["state"]["client_state"] = self._client_state
        self._header_bytes = 0
        self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the bytes of a header. Trailers arrive here too; they are counted and dropped."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes + len(self.url) > MAX_HEADER_BYTES:
            self._fail(HeadersTooLarge())
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._buffered_bytes = 0
        self._stop_timer()
        if self.parser.should_upgrade() and self._has_body():
            # The parser treats what follows as another protocol, so the body would be lost silently.
            self._fail(InvalidRequest("Only HTTP/1.1 is spoken here: send the request without an Upgrade header"))
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._buffered_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_headers = True
        self._buffered_bytes = 0
        super().on_message_complete()

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
        self._timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    def _cut_off(self) -> None:
        """Let the request in flight have its answer, as the last one: the bytes after it cannot be read."""
        self._client_state.cut_off = True
        self.cycle.keep_alive = False
        self.cycle.message_event.set()

    def _in_flight(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _has_body(self) -> bool:
        headers = dict(self.headers)
        return headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers

    def _start_timer(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self.header_seconds, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        """Answer with 408.

        Headers may have to wait for the answer to the request before them; that is not the client's fault.
        """
        self._timer = None
        if self._in_flight():
            self._start_timer()
        else:
            self._refuse(RequestTimeout(f"The request's headers took longer than {self.header_seconds:g} seconds"))

    def _raw_response(self, error: ApiError, request_id: str) -> bytes:
        body = encode_json(ErrorBody.from_error(error))
        headers = [
            *self.server_state.default_headers,
            (b"content-type", JSON.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
            (b"connection", b"close"),
        ]
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body])


def connection_class(*, header_seconds: float, random: Random) -> type[asyncio.Protocol]:
    """Return a subclass with its settings bound, for uvicorn to instantiate."""
    return type("BoundConnection", (ServerConnection,), {"header_seconds": header_seconds, "random": random})
