"""One connection to the upstream: a request goes out, one answer comes back.

Whatever the other side sends, memory stays bounded: an answer by ``max_answer_bytes``, everything around it (status
line, headers, chunk extensions, trailers) by 64 KiB. The events of an answer go to who asked for them as they come,
and how many are held is for that one to say.
"""

import asyncio
import re
from collections import deque
from collections.abc import Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from math import isfinite
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.ports import Clock

_MAX_HEAD_BYTES = 64 * 1024
_RACE_SECONDS = 1.0
"""A close that comes later than this after the request was sent is no race with an idle timeout of the server."""

_READ_HEADERS = (
    b"content-length",
    b"content-type",
    b"content-encoding",
    b"transfer-encoding",
    b"retry-after",
    b"retry-after-ms",
    b"x-request-id",
)
_HEADERS = {
    spelling: name if name in _READ_HEADERS else b""
    for name in (*_READ_HEADERS, b"date", b"server", b"connection")
    for spelling in (name, name.title())
}
"""What servers send most, as they spell it, and the name to keep it under, if it is kept."""

CLOSED = Fault(kind=FaultKind.BROKEN, detail="the connection was closed on this side")
_EVENTS = b"text/event-stream"
_NUMBER = re.compile(rb"\d{1,20}(\.\d{0,20})?", re.ASCII)


class Events(Protocol):
    """Takes the body of an answer of server-sent events."""

    def begin(self, head: Answer, connection: "UpstreamConnection") -> None: ...

    def feed(self, data: bytes) -> None: ...

    def end(self, outcome: Reply) -> None:
        """Nothing follows: the answer is complete, or a fault broke it off."""


class UpstreamExchange(asyncio.Future[Reply]):
    """A request that is under way, and what comes of it.

    Where ``events`` takes them and the answer is made of events, its head is the result as soon as it is there.
    """

    __slots__ = ("abandon", "events", "request", "started")

    request: bytes
    started: float
    events: Events | None
    abandon: Callable[[], object]
    """Ends what is being done for it. Whoever works for it sets this."""

    def cancel(self, msg: object = None) -> bool:
        """Also whoever awaits this and is cancelled comes here."""
        if not super().cancel(msg):
            return False
        self.abandon()
        return True


class UpstreamConnection(asyncio.Protocol):
    """Speaks HTTP/1.1, one exchange at a time, and lies among the idle ones between them."""

    def __init__(
        self,
        *,
        clock: Clock,
        max_answer_bytes: int,
        idle: deque["UpstreamConnection"],
        on_never_taken: Callable[[UpstreamExchange], None],
    ) -> None:
        self._clock = clock
        self._max_bytes = max_answer_bytes
        self._digits = len(str(max_answer_bytes))
        self._idle = idle
        self._on_never_taken = on_never_taken
        self._loop = asyncio.get_running_loop()
        self._parser = HttpResponseParser(self)
        self._busy = False
        self._exchange: UpstreamExchange | None = None
        self._events: Events | None = None
        self._exchanges = 0
        self._timeout = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._alarmed_exchange = 0
        self._begun = False
        self._overhead = self._head_bytes = self._status = 0
        self._headers: dict[bytes, bytes] = {}
        self._body: bytes | bytearray = b""
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self.reusable = True
        self.idle_since = 0.0

    def send(self, exchange: UpstreamExchange, *, timeout: float) -> None:
        """Only the first on a connection may have less time than the others: deadlines never go back."""
        # The rest of an answer nobody waits for must never be taken for the answer to a later request.
        exchange.abandon = self.close
        self._exchange = exchange
        self._busy = True
        self._exchanges += 1
        self._timeout = timeout
        self._begun = False
        self._overhead = self._status = 0
        if self._alarm is None:
            self._be_woken_in(timeout)
        self._transport.write(exchange.request)

    def close(self) -> None:
        self.reusable = False
        self._settle(CLOSED)
        self._transport.abort()

    def give_up(self, waited: float) -> None:
        self._fail(FaultKind.TIMEOUT, f"nothing came for {waited:.3g} s")

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._busy:
            # Nobody asked: whatever this is, it must not be read as the next answer.
            self.close()
            return
        self._begun = True
        self._overhead += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:
            self._fail(FaultKind.GARBLED, "the server switched protocols")
        except HttpParserError as error:
            self._fail(FaultKind.GARBLED, f"not an HTTP answer: {error}")
        if self._overhead > _MAX_HEAD_BYTES:
            self._fail_oversized_head()
        if self._busy:
            return
        # Only now is it known that nothing came behind the answer.
        if self.reusable:
            self.idle_since = self._clock.steady()
            self._idle.append(self)
        else:
            self.close()

    def eof_received(self) -> None:
        self.reusable = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self in self._idle:
            self._idle.remove(self)
        if self._busy:
            self._settle_lost(clean=exc is None)
        if self._alarm is not None:
            self._alarm.cancel()
        self.lost.set_result(None)

    def on_message_begin(self) -> None:
        # Where none is awaited any more, this one comes behind the answer.
        self.reusable = self._busy
        self._headers = {}
        self._head_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._fail_oversized_head()
        key = _HEADERS.get(name)
        if key is None:
            key = _HEADERS.get(name.lower())
        if key:
            self._headers[key] = value

    def on_headers_complete(self) -> None:
        status = self._status = self._parser.get_status_code()
        headers = self._headers
        if not 100 <= status < 600 or status == 101:
            self._fail(FaultKind.GARBLED, f"not an HTTP answer: status {status}")
        if b"content-encoding" in headers and _token(headers[b"content-encoding"]) not in {b"identity", b""}:
            self._fail(FaultKind.GARBLED, "the answer is compressed, which was not asked for")
        if b"transfer-encoding" in headers and _token(headers[b"transfer-encoding"]) != b"chunked":
            self._fail(FaultKind.GARBLED, "the answer has an unknown transfer encoding")
        exchange = self._exchange
        if exchange is None:
            return
        if exchange.events is not None and 200 <= status < 300 and _is_events(headers.get(b"content-type", b"")):
            self._begin_events(exchange, exchange.events)
        elif len(length := headers.get(b"content-length", b"")) >= self._digits and int(length) > self._max_bytes:
            self._fail_oversized_answer()

    def on_body(self, data: bytes) -> None:
        self._overhead = 0
        if self._exchange is None:
            if self._events is not None:
                self._events.feed(data)
        elif len(self._body) + len(data) > self._max_bytes:
            self._fail_oversized_answer()
        elif not self._body:
            self._body = data
        else:
            # Not a list of pieces: chunks of a few bytes would cost many times their size.
            self._body = self._body if isinstance(self._body, bytearray) else bytearray(self._body)
            self._body += data

    def on_message_complete(self) -> None:
        if self._busy and self._status >= 200:
            self.reusable = self._parser.should_keep_alive()
            self._settle(self._answer())

    def _begin_events(self, exchange: UpstreamExchange, events: Events) -> None:
        self._exchange = None
        self._events = events
        head = self._answer()
        events.begin(head, self)
        exchange.set_result(head)

    def _answer(self) -> Answer:
        headers, body = self._headers, self._body
        told_to_wait = b"retry-after" in headers or b"retry-after-ms" in headers
        return Answer(
            status=self._status,
            body=body if isinstance(body, bytes) else bytes(body),
            request_id=_request_id(headers[b"x-request-id"]) if b"x-request-id" in headers else None,
            retry_after=_retry_after(headers, self._clock) if told_to_wait else None,
        )

    def _ends_with_the_connection(self) -> bool:
        return self._status >= 200 and self._headers.keys().isdisjoint({b"content-length", b"transfer-encoding"})

    def _settle_lost(self, *, clean: bool) -> None:
        exchange = self._exchange
        if self._begun:
            if clean and self._ends_with_the_connection():
                self._settle(self._answer())
            else:
                self._fail(FaultKind.BROKEN, "the connection ended in the middle of the answer")
        elif exchange is not None and self._exchanges > 1 and self._clock.steady() - exchange.started <= _RACE_SECONDS:
            self._exchange = None
            self._on_never_taken(exchange)
        else:
            self._fail(FaultKind.BROKEN, "the connection ended before an answer came")

    def _be_woken_in(self, seconds: float) -> None:
        """One timer serves many exchanges: most end long before it is due, and to set one for each takes 2 us."""
        self._alarmed_exchange = self._exchanges
        self._alarm = self._loop.call_at(self._loop.time() + seconds, self._look_at_the_time)

    def _look_at_the_time(self) -> None:
        self._alarm = None
        if self._exchange is None:
            return
        if self._alarmed_exchange == self._exchanges:
            self._fail(FaultKind.TIMEOUT, f"no complete answer within {self._timeout:.3g} s")
        else:
            self._be_woken_in(self._exchange.started + self._timeout - self._clock.steady())

    def _fail_oversized_head(self) -> None:
        self._fail(FaultKind.GARBLED, f"headers over {_MAX_HEAD_BYTES} bytes")

    def _fail_oversized_answer(self) -> None:
        self._fail(FaultKind.GARBLED, f"answer over {self._max_bytes} bytes")

    def _fail(self, kind: FaultKind, detail: str) -> None:
        self._settle(Fault(kind=kind, detail=detail))
        self.close()

    def _settle(self, outcome: Reply) -> None:
        exchange, self._exchange = self._exchange, None
        events, self._events = self._events, None
        self._busy = False
        self._body = b""
        if events is not None:
            events.end(outcome)
        if exchange is not None and not exchange.done():
            exchange.set_result(outcome)


def _is_events(content_type: bytes) -> bool:
    return _token(content_type.partition(b";")[0]) == _EVENTS


def _token(value: bytes) -> bytes:
    return value.strip().lower()


def _request_id(value: bytes) -> str | None:
    text = value.strip().decode("latin-1")
    return text if 0 < len(text) <= 200 and text.isascii() and text.isprintable() else None


def _retry_after(headers: dict[bytes, bytes], clock: Clock) -> float | None:
    """Seconds to wait, from milliseconds where the server is that exact, from seconds or from a date."""
    milliseconds = headers.get(b"retry-after-ms", b"").strip()
    if _NUMBER.fullmatch(milliseconds):
        return float(milliseconds) / 1000
    seconds = headers.get(b"retry-after", b"").strip()
    return float(seconds) if _NUMBER.fullmatch(seconds) else _seconds_until(seconds.decode("latin-1"), clock)


def _seconds_until(date: str, clock: Clock) -> float | None:
    try:
        at = parsedate_to_datetime(date)
        stamp = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
    return max(0.0, stamp - clock.now()) if isfinite(stamp) else None
