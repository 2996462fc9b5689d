"""One connection to the upstream: a request goes out, one answer comes back.

Whatever the other side sends, memory stays bounded: an answer by ``max_answer_bytes``, everything around it (status
line, headers, chunk extensions, trailers) by 64 KiB. The events of an answer go to who asked for them as they come,
and how many are held is for that one to say.
"""

import asyncio
import re
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

_READ_HEADERS = frozenset(
    {
        b"content-length",
        b"content-type",
        b"content-encoding",
        b"transfer-encoding",
        b"retry-after",
        b"retry-after-ms",
        b"x-request-id",
    }
)
_EVENTS = b"text/event-stream"
_REQUEST_ID = re.compile(rb"[\x20-\x7e]{1,200}")
_NUMBER = re.compile(rb"\d{1,20}(\.\d{0,20})?", re.ASCII)


class NeverTaken(Exception):
    """The server had closed a kept-alive connection before it took the request."""


class Events(Protocol):
    """Takes the body of an answer of server-sent events."""

    def begin(self, head: Answer) -> None: ...

    def feed(self, data: bytes) -> None: ...

    def end(self, outcome: Reply) -> None:
        """Nothing follows: the answer is complete, or a fault broke it off."""


class Connection(asyncio.Protocol):
    """Speaks HTTP/1.1, one exchange at a time."""

    def __init__(self, *, clock: Clock, max_answer_bytes: int, on_lost: Callable[["Connection"], None]) -> None:
        self._clock = clock
        self._max_answer_bytes = max_answer_bytes
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._parser = HttpResponseParser(self)
        self._waiter: asyncio.Future[Reply] | None = None
        self._wanted: Events | None = None
        self._events: Events | None = None
        self._exchanges = 0
        self._sent_at = 0.0
        self._timeout = self._deadline = 0.0
        self._alarm: asyncio.TimerHandle | None = None
        self._begun = False
        self._overhead = 0
        self._head_bytes = 0
        self._headers: dict[bytes, bytes] = {}
        self._body: bytes | bytearray = b""
        self._until_eof = False
        self.lost: asyncio.Future[None] = self._loop.create_future()
        self.reusable = True
        self.idle_since = 0.0

    async def exchange(self, request: bytes, *, timeout: float, events: Events | None = None) -> Reply:
        """Send a request and wait for what comes of it. Raises NeverTaken when it may be sent again at once.

        Where ``events`` takes them and the answer is made of events, its head is returned as soon as it is there.
        """
        waiter: asyncio.Future[Reply] = self._loop.create_future()
        self._waiter = waiter
        self._wanted = events
        self._exchanges += 1
        self._sent_at = self._clock.steady()
        self._timeout = timeout
        self._begun = False
        self._overhead = 0
        self._be_woken_at(self._loop.time() + timeout)
        self._transport.write(request)
        try:
            return await waiter
        except asyncio.CancelledError:
            # The rest of this answer must never be taken for the answer to a later request.
            self.close()
            raise

    def close(self) -> None:
        self.reusable = False
        self._settle(Fault(kind=FaultKind.BROKEN, detail="the connection was closed on this side"))
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
        if self._waiter is None and self._events is None:
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

    def eof_received(self) -> None:
        self.reusable = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._waiter is not None or self._events is not None:
            self._settle_lost(clean=exc is None)
        if self._alarm is not None:
            self._alarm.cancel()
        self.lost.set_result(None)
        self._on_lost(self)

    def on_message_begin(self) -> None:
        if self._waiter is None and self._events is None:
            self.close()
        self._headers = {}
        self._head_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > _MAX_HEAD_BYTES:
            self._fail_oversized_head()
        key = name.lower()
        if key in _READ_HEADERS:
            self._headers[key] = value.strip()

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers = self._headers
        if not 100 <= status < 600 or status == 101:
            self._fail(FaultKind.GARBLED, f"not an HTTP answer: status {status}")
        if headers.get(b"content-encoding", b"identity").lower() not in {b"identity", b""}:
            self._fail(FaultKind.GARBLED, "the answer is compressed, which was not asked for")
        if headers.get(b"transfer-encoding", b"chunked").lower() != b"chunked":
            self._fail(FaultKind.GARBLED, "the answer has an unknown transfer encoding")
        streams = self._wanted is not None and 200 <= status < 300 and _is_events(headers.get(b"content-type", b""))
        if not streams and int(headers.get(b"content-length", b"0")) > self._max_answer_bytes:
            self._fail_oversized_answer()
        self._until_eof = status >= 200 and b"content-length" not in headers and b"transfer-encoding" not in headers
        if streams:
            self._begin_events()

    def on_body(self, data: bytes) -> None:
        self._overhead = 0
        if self._waiter is None:
            if self._events is not None:
                self._events.feed(data)
        elif len(self._body) + len(data) > self._max_answer_bytes:
            self._fail_oversized_answer()
        elif not self._body:
            self._body = data
        else:
            # Not a list of pieces: chunks of a few bytes would cost many times their size.
            self._body = self._body if isinstance(self._body, bytearray) else bytearray(self._body)
            self._body += data

    def on_message_complete(self) -> None:
        if (self._waiter is None and self._events is None) or self._parser.get_status_code() < 200:
            return
        self.reusable = self._parser.should_keep_alive()
        self._settle(self._answer())
        if not self.reusable:
            self.close()

    def _begin_events(self) -> None:
        waiter, self._waiter = self._waiter, None
        events, self._wanted = self._wanted, None
        if waiter is None or waiter.done() or events is None:
            return
        # Until its end came, nobody else may use the connection.
        self.reusable = False
        self._events = events
        head = self._answer()
        events.begin(head)
        waiter.set_result(head)

    def _answer(self) -> Answer:
        headers = self._headers
        return Answer(
            status=self._parser.get_status_code(),
            body=bytes(self._body),
            request_id=_request_id(headers.get(b"x-request-id")),
            retry_after=_retry_after(headers, self._clock),
        )

    def _settle_lost(self, *, clean: bool) -> None:
        if self._begun:
            if clean and self._until_eof:
                self._settle(self._answer())
            else:
                self._fail(FaultKind.BROKEN, "the connection ended in the middle of the answer")
        elif self._exchanges > 1 and self._clock.steady() - self._sent_at <= _RACE_SECONDS:
            self._settle(NeverTaken())
        else:
            self._fail(FaultKind.BROKEN, "the connection ended before an answer came")

    def _be_woken_at(self, deadline: float) -> None:
        """One timer serves many exchanges: most end long before it is due, and to set one for each takes 2 us."""
        self._deadline = deadline
        if self._alarm is not None and self._alarm.when() > deadline:
            self._alarm.cancel()
            self._alarm = None
        if self._alarm is None:
            self._alarm = self._loop.call_at(deadline, self._look_at_the_time)

    def _look_at_the_time(self) -> None:
        self._alarm = None
        if self._waiter is None:
            return
        if self._loop.time() < self._deadline:
            self._be_woken_at(self._deadline)
            return
        self._fail(FaultKind.TIMEOUT, f"no complete answer within {self._timeout:.3g} s")

    def _fail_oversized_head(self) -> None:
        self._fail(FaultKind.GARBLED, f"headers over {_MAX_HEAD_BYTES} bytes")

    def _fail_oversized_answer(self) -> None:
        self._fail(FaultKind.GARBLED, f"answer over {self._max_answer_bytes} bytes")

    def _fail(self, kind: FaultKind, detail: str) -> None:
        self._settle(Fault(kind=kind, detail=detail))
        self.close()

    def _settle(self, outcome: Reply | NeverTaken) -> None:
        waiter, self._waiter = self._waiter, None
        self._body = b""
        self._until_eof = False
        events, self._events = self._events, None
        if events is not None and not isinstance(outcome, NeverTaken):
            events.end(outcome)
        if waiter is None or waiter.done():
            return
        if isinstance(outcome, NeverTaken):
            waiter.set_exception(outcome)
        else:
            waiter.set_result(outcome)


def _is_events(content_type: bytes) -> bool:
    return content_type.partition(b";")[0].strip().lower() == _EVENTS


def _request_id(value: bytes | None) -> str | None:
    return value.decode() if value is not None and _REQUEST_ID.fullmatch(value) else None


def _retry_after(headers: dict[bytes, bytes], clock: Clock) -> float | None:
    """Seconds to wait, from milliseconds where the server is that exact, from seconds or from a date."""
    milliseconds = headers.get(b"retry-after-ms", b"")
    if _NUMBER.fullmatch(milliseconds):
        return float(milliseconds) / 1000
    seconds = headers.get(b"retry-after")
    if seconds is None:
        return None
    return float(seconds) if _NUMBER.fullmatch(seconds) else _seconds_until(seconds.decode("latin-1"), clock)


def _seconds_until(date: str, clock: Clock) -> float | None:
    try:
        at = parsedate_to_datetime(date)
        stamp = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        return None
    return max(0.0, stamp - clock.now()) if isfinite(stamp) else None
