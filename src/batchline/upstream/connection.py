"""Sends requests over one HTTP/1.1 connection and reads their answers.

batchline has its own HTTP client because the libraries are too slow: they cost 65 to 155 us per request, this one
10 us, and the budget for everything that is done per line is 60 us.

Memory stays bounded for any bytes that the server sends: an answer by ``max_answer_bytes``, all large answers of the
process by ``HeldBytes``, and everything around an answer (status line, headers, chunk extensions, trailers) by 64 KiB.
An answer of server-sent events is passed to the exchange's ``EventReceiver`` as it arrives, and the receiver limits how
much of it is held.
"""

import asyncio
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from msgspec.structs import replace

from batchline.domain.held_bytes import HeldBytes, Reservation
from batchline.domain.rate_limits import (
    RATE_LIMIT_HEADERS,
    RETRY_AFTER_HEADERS,
    read_clock_offset,
    read_rate_limits,
    read_retry_after,
)
from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.ports import Clock
from batchline.upstream.arrival import Arrival, arrival_of
from batchline.upstream.encoding import Undecodable, decode, is_plain, is_readable
from batchline.upstream.end_check import EndCheck

_MAX_HEAD_BYTES = 64 * 1024
_MAX_SHOWN_BYTES = 50
_RESET_AT_CLOSE = struct.pack("ii", 1, 0)
_UNRESERVED_BYTES = 64 * 1024
"""An answer up to this size reserves nothing: nearly all are smaller, and never wait for large ones."""
_RESERVED_STEP_BYTES = 256 * 1024
"""The bytes that a large answer reserves ahead: as many as one read from the socket returns. So an answer that arrives
slowly reserves little more than the bytes that have arrived."""

_READ_HEADERS = (
    b"content-length",
    b"content-type",
    b"content-encoding",
    b"transfer-encoding",
    b"x-request-id",
    b"date",
)
_HEADERS = {
    spelling: name if name in _READ_HEADERS else b""
    for name in (*_READ_HEADERS, b"server", b"connection")
    for spelling in (name, name.title())
}
"""The most frequent headers, in both spellings, and the name to keep each under; empty if it is not kept."""

_LIMIT_HEADERS = RETRY_AFTER_HEADERS | RATE_LIMIT_HEADERS
"""Kept apart from the other headers, so that an answer without them costs only a test for an empty dict."""

CLOSED = Fault(kind=FaultKind.BROKEN, detail="the connection was closed on this side")
_EVENT_STREAM = b"text/event-stream"


class EventReceiver(Protocol):
    """Receives the body of an answer of server-sent events.

    ``streaming.EventStream`` implements it and imports this module, so this module knows only the interface.
    """

    def begin(self, head: Answer, connection: "UpstreamConnection") -> None:
        """Take the answer's status and headers, and the connection that its body arrives on."""

    def feed(self, data: bytes) -> None:
        """Take the next bytes of the body."""

    def end(self, outcome: Reply) -> None:
        """Take the end of the body: an Answer if it is complete, a Fault if it broke off."""


class UpstreamExchange(asyncio.Future[Reply]):
    """One request and the future of its reply.

    If ``events`` is set and the answer is made of server-sent events, the result is the answer's head, and it is set
    as soon as the head has arrived.
    """

    __slots__ = ("events", "on_cancel", "request", "started")

    request: tuple[bytes, ...]
    """The parts of the request, which are written one after the other."""
    started: float
    events: EventReceiver | None
    on_cancel: Callable[[], object]
    """Stops the task or the connection that works on the request now; each of them sets this when it takes over."""

    def cancel(self, msg: object = None) -> bool:
        """Cancel the request and stop its connection. Cancelling the task that awaits it does the same."""
        if not super().cancel(msg):
            return False
        self.on_cancel()
        return True


class UpstreamConnection(asyncio.Protocol):
    """An HTTP/1.1 connection that carries one exchange at a time and is in the ``idle`` queue between exchanges."""

    def __init__(
        self,
        *,
        clock: Clock,
        max_answer_bytes: int,
        held_bytes: HeldBytes,
        idle: deque["UpstreamConnection"],
    ) -> None:
        self._clock = clock
        self._max_bytes = max_answer_bytes
        self._max_bytes_digits = len(str(max_answer_bytes))
        self._held_bytes = held_bytes
        self._reservation: Reservation | None = None
        self._readable_bytes = _UNRESERVED_BYTES
        self._paused_at: float | None = None
        self._paused_seconds = 0.0
        self._idle = idle
        self._loop = asyncio.get_running_loop()
        self._parser = HttpResponseParser(self)
        self._busy = False
        self._exchange: UpstreamExchange | None = None
        self._events: EventReceiver | None = None
        self._exchanges = 0
        self._timeout = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._timed_exchange = 0
        self._answer_begun = False
        self._bytes_since_body = self._head_bytes = self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._limit_headers: dict[bytes, bytes] = {}
        self._clock_offset = 0.0
        """The seconds by which the server's clock is ahead, if the answer has headers with limits."""
        self._body: bytes | bytearray = b""
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.reusable = True
        self.idle_since = 0.0

    def send(self, exchange: UpstreamExchange, *, timeout: float) -> None:
        """Send a request; its answer resolves the exchange.

        Only the first exchange of a connection may have a shorter timeout than the later ones: the one timer relies
        on deadlines that never move back.
        """
        # The rest of an answer that is no longer awaited must never be read as the answer to a later request.
        exchange.on_cancel = self.close
        self._exchange = exchange
        self._busy = True
        self._exchanges += 1
        self._timeout = timeout
        self._answer_begun = False
        self._bytes_since_body = self._status = 0
        self._paused_seconds = 0.0
        if self._timer is None:
            self._schedule_deadline_check(timeout)
        self._transport.writelines(exchange.request)

    def is_open(self) -> bool:
        """Return whether an idle connection can carry another request.

        The server may have closed it since the event loop last read from it, and would lose the request.
        """
        return self.reusable and not self._end_check.has_ended()

    @property
    def first_exchange(self) -> UpstreamExchange | None:
        """The exchange in flight, if it is the first on this connection."""
        return self._exchange if self._exchanges == 1 else None

    def arrival(self) -> Arrival:
        """Return whether what was sent has reached the server."""
        return arrival_of(self._transport.get_extra_info("socket"))

    def abandon(self) -> None:
        """Close the connection at once, and leave its exchange to the caller. What was sent cannot arrive later."""
        self._exchange = None
        self._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_AT_CLOSE)
        self.close()

    def close(self) -> None:
        """Close the connection at once; an exchange that is in flight ends with the fault CLOSED."""
        self.reusable = False
        self._resolve(CLOSED)
        self._transport.abort()

    def fail_stalled(self, waited: float) -> None:
        """End the stream in flight with a timeout, because no data arrived for this many seconds."""
        self._fail(FaultKind.TIMEOUT, f"no data received for {waited:.3g} s")

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._end_check = EndCheck(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if not self._busy:
            # No request is in flight, so these bytes must not be read as the answer to the next one.
            self.close()
            return
        self._answer_begun = True
        self._bytes_since_body += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self._fail(FaultKind.GARBLED, "the server switched protocols")
        except HttpParserError as error:
            self._fail(FaultKind.GARBLED, f"not an HTTP answer: {error}")
        if self._bytes_since_body > _MAX_HEAD_BYTES:
            self._fail_oversized_head()
        if self._busy:
            return
        # Only now, with all the data parsed, is it known that nothing follows the answer.
        if self.reusable:
            self.idle_since = self._clock.steady()
            self._idle.append(self)
        else:
            self.close()

    def eof_received(self) -> None:
        self.reusable = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        self._end_check.close()
        if self in self._idle:
            self._idle.remove(self)
        if self._busy:
            self._resolve_lost(clean=exc is None)
        if self._timer is not None:
            self._timer.cancel()
        self.closed.set_result(None)

    def on_message_begin(self) -> None:
        # If no answer is awaited any more, this message follows the answer and the connection is of no further use.
        self.reusable = self._busy
        self._headers = {}
        self._head_bytes = 0
        if self._limit_headers:
            self._limit_headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._fail_oversized_head()
        key = _HEADERS.get(name)
        if key is None:
            name = name.lower()
            key = _HEADERS.get(name)
            if key is None and name in _LIMIT_HEADERS:
                self._limit_headers[name] = value
        if key:
            self._headers[key] = value

    def on_headers_complete(self) -> None:
        status = self._status = self._parser.get_status_code()
        headers = self._headers
        if self._limit_headers:
            self._clock_offset = read_clock_offset(headers.get(b"date"), self._clock.now())
        if not 100 <= status < 600 or status == 101:
            self._fail(FaultKind.GARBLED, f"not an HTTP answer: status {status}")
        if b"content-encoding" in headers:
            self._check_encoding(headers[b"content-encoding"])
        if b"transfer-encoding" in headers and _token(headers[b"transfer-encoding"]) != b"chunked":
            self._fail(FaultKind.GARBLED, "the answer has an unknown transfer encoding")
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.events is not None and 200 <= status < 300 and _is_event_stream(headers.get(b"content-type", b"")):
            self._begin_events(exchange, exchange.events)
        elif (
            len(length := headers.get(b"content-length", b"")) >= self._max_bytes_digits
            and int(length) > self._max_bytes
        ):
            self._fail_oversized_answer()

    def on_body(self, data: bytes) -> None:
        self._bytes_since_body = 0
        if self._exchange is None:
            if self._events is not None:
                self._events.feed(data)
        elif len(self._body) + len(data) > self._max_bytes:
            self._fail_oversized_answer()
        elif not self._body:
            self._body = data
        else:
            # A bytearray and not a list of pieces: a piece of a few bytes would take many times its size.
            self._body = self._body if isinstance(self._body, bytearray) else bytearray(self._body)
            self._body += data
        if len(self._body) > self._readable_bytes:
            self._reserve()

    def on_message_complete(self) -> None:
        if self._busy and self._status >= 200:
            self.reusable = self._parser.should_keep_alive()
            self._resolve(self._decode_reply() if b"content-encoding" in self._headers else self._build_answer())

    def _check_encoding(self, encoding: bytes) -> None:
        """Fail at once if this is the head of a success that cannot be read. A refusal is explained by its status.

        Events are not decompressed: a few bytes of them could become more than may be held.
        """
        streams = _is_event_stream(self._headers.get(b"content-type", b""))
        if 200 <= self._status < 300 and not is_plain(encoding) and (streams or not is_readable(encoding)):
            name = encoding[:_MAX_SHOWN_BYTES].decode("ascii", "replace")
            self._fail(FaultKind.UNREADABLE, f"the answer has the encoding {name!r}, and identity was asked for")

    def _reserve(self) -> None:
        """Reserve bytes for the next read, and read nothing until they are there."""
        if self._reservation is None:
            self._reservation = Reservation(self._held_bytes, on_room=self._on_room)
        self._reservation.grow_to(min(len(self._body) + _RESERVED_STEP_BYTES, self._max_bytes))
        if self._reservation.waiting and self._paused_at is None:
            self._paused_at = self._loop.time()
            self._transport.pause_reading()

    def _on_room(self) -> None:
        if self._reservation is not None:
            self._readable_bytes = self._reservation.size
        self._resume()

    def _resume(self) -> None:
        if self._paused_at is not None:
            self._paused_seconds += self._loop.time() - self._paused_at
            self._paused_at = None
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _end_reservation(self, reservation: Reservation, outcome: Reply) -> None:
        """Give the reserved bytes back: at once, or when the last reference to a complete answer is dropped.

        A complete answer may have to wait until it is recorded, and more answers must not fill the memory meanwhile.
        """
        self._reservation = None
        if isinstance(outcome, Answer):
            reservation.complete()
            weakref.finalize(outcome, reservation.end).atexit = False
        else:
            reservation.end()
        self._readable_bytes = _UNRESERVED_BYTES
        self._resume()

    def _begin_events(self, exchange: UpstreamExchange, events: EventReceiver) -> None:
        self._exchange = None
        self._events = events
        head = self._build_answer()
        events.begin(head, self)
        exchange.set_result(head)

    def _decode_reply(self) -> Reply:
        """Return the answer with its body decompressed, if it is compressed, or a fault if that fails."""
        encoding = self._headers.get(b"content-encoding", b"")
        if not encoding or is_plain(encoding) or not self._body:
            return self._build_answer()
        try:
            self._body = decode(self._body, encoding, max_bytes=self._max_bytes)
        except Undecodable as error:
            if 200 <= self._status < 300:
                return Fault(kind=FaultKind.UNREADABLE, detail=str(error))
            self._body = b""
        return self._build_answer()

    def _build_answer(self) -> Answer:
        headers, body = self._headers, self._body
        answer = Answer(
            status=self._status,
            body=body if isinstance(body, bytes) else bytes(body),
            request_id=_request_id(headers[b"x-request-id"]) if b"x-request-id" in headers else None,
        )
        if not self._limit_headers:
            return answer
        return _with_limits(answer, self._limit_headers, self._clock.now() + self._clock_offset)

    def _ends_at_close(self) -> bool:
        return self._status >= 200 and self._headers.keys().isdisjoint({b"content-length", b"transfer-encoding"})

    def _resolve_lost(self, *, clean: bool) -> None:
        if self._answer_begun:
            if clean and self._ends_at_close():
                self._resolve(self._decode_reply())
            else:
                self._fail(FaultKind.BROKEN, "the connection ended in the middle of the answer")
        else:
            self._fail(FaultKind.BROKEN, "the connection ended before an answer came")

    def _schedule_deadline_check(self, seconds: float) -> None:
        """Set the timer that enforces the timeout.

        One timer serves many exchanges: most end long before it is due, and setting one for each costs 2 us.
        """
        self._timed_exchange = self._exchanges
        self._timer = self._loop.call_at(self._loop.time() + seconds, self._check_deadline)

    def _check_deadline(self) -> None:
        self._timer = None
        if self._exchange is None:
            return
        if self._timed_exchange == self._exchanges:
            if self._paused_at is not None:
                # The answer waits for this process, and not for the server.
                self._schedule_deadline_check(self._timeout)
            elif self._paused_seconds:
                self._schedule_deadline_check(self._paused_seconds)
                self._paused_seconds = 0.0
            else:
                self._fail(FaultKind.TIMEOUT, f"no complete answer within {self._timeout:.3g} s")
        else:
            self._schedule_deadline_check(self._exchange.started + self._timeout - self._clock.steady())

    def _fail_oversized_head(self) -> None:
        self._fail(FaultKind.GARBLED, f"headers over {_MAX_HEAD_BYTES} bytes")

    def _fail_oversized_answer(self) -> None:
        size = self._max_bytes if 200 <= self._status < 300 else 0
        self._fail(FaultKind.GARBLED, f"answer over {self._max_bytes} bytes", answer_bytes=size)

    def _fail(self, kind: FaultKind, detail: str, *, answer_bytes: int = 0) -> None:
        self._resolve(Fault(kind=kind, detail=detail, answer_bytes=answer_bytes))
        self.close()

    def _resolve(self, outcome: Reply) -> None:
        exchange, self._exchange = self._exchange, None
        events, self._events = self._events, None
        self._busy = False
        self._body = b""
        if self._reservation is not None:
            self._end_reservation(self._reservation, outcome)
        if events is not None:
            events.end(outcome)
        if exchange is not None and not exchange.done():
            exchange.set_result(outcome)


def _is_event_stream(content_type: bytes) -> bool:
    return _token(content_type.partition(b";")[0]) == _EVENT_STREAM


def _token(value: bytes) -> bytes:
    return value.strip().lower()


def _request_id(value: bytes) -> str | None:
    text = value.strip().decode("latin-1")
    return text if 0 < len(text) <= 200 and text.isascii() and text.isprintable() else None


def _with_limits(answer: Answer, headers: dict[bytes, bytes], now: float) -> Answer:
    return replace(answer, retry_after=read_retry_after(headers, now), rate_limits=read_rate_limits(headers, now))
