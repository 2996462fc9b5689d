"""The routes of a batch's results: pages and events of them while it runs, and all results of a lineage merged."""

import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import closing
from functools import partial
from math import inf
from typing import Any

from msgspec.json import encode as encode_json
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from batchline.api.auth import Auth
from batchline.api.batches import batch_id_of
from batchline.api.content import Content
from batchline.api.event_stream import STREAM_HEADERS, first_of, wait_for_disconnect
from batchline.api.paging import choice, integer
from batchline.api.request_context import ClientState, client_state_of
from batchline.api.responses import JSON
from batchline.api.throttle import Throttle
from batchline.domain.errors import InvalidCredentials, InvalidRequest, ObjectsDown, StoreDown
from batchline.domain.events import error_event
from batchline.domain.records import Owner
from batchline.domain.result_order import START, Cursor
from batchline.domain.wire import BatchObject
from batchline.pipeline.merge import Merger
from batchline.pipeline.results import LineStatus, PlacedResult, ResultReader, ResultStream
from batchline.ports import Clock

log = logging.getLogger(__name__)

_DEFAULT_PAGE_LINES, _MAX_PAGE_LINES = 1_000, 10_000
_MAX_PAGE_BYTES = 16 * 1024 * 1024
"""A page takes no further line once it is this large; the next page goes on."""
_POLL_SECONDS = 0.5
"""The time between two polls of a stream for new lines, which is also the least time between two events about a
batch."""
_COMMENT_SECONDS = 15.0
"""The time after which a stream without events sends a comment, so that its connection is not taken for a dead one."""
_EVENT_STREAM = "text/event-stream"
_COMMENT = b":\n\n"
_END = b"event: end\ndata: {}\n\n"


class ResultRoutes:
    """Sends the results of a batch, also while it runs."""

    def __init__(self, *, auth: Auth, throttle: Throttle, reader: ResultReader, merger: Merger, clock: Clock) -> None:
        self._auth, self._throttle = auth, throttle
        self._reader, self._merger, self._clock = reader, merger, clock

    async def results(self, request: Request) -> ASGIApp:
        owner = await self._auth.owner(request)
        return partial(self._answer, owner, self._results(request, owner))

    async def merged(self, request: Request) -> ASGIApp:
        owner = await self._auth.owner(request)
        return partial(self._answer, owner, self._merged(request, owner))

    async def _answer(
        self, owner: Owner, answer: Coroutine[Any, Any, ASGIApp], scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send an answer while the project has a slot for it: each holds a few MiB, however slowly it is read."""
        with closing(answer), self._throttle.slot(owner.project_id):
            await (await answer)(scope, receive, send)

    async def _results(self, request: Request, owner: Owner) -> ASGIApp:
        batch_id, query = batch_id_of(request), request.query_params
        streams = request.method == "GET" and _EVENT_STREAM in request.headers.get("accept", "")
        after = (request.headers.get("last-event-id") if streams else None) or query.get("after")
        limit = _limit(integer(query, "limit", code="invalid_limit"))
        status = choice(query, "status", tuple(LineStatus))
        stream = await self._reader.open(
            owner.project_id,
            batch_id,
            after=_cursor(after),
            status=None if status is None else LineStatus(status),
        )
        first = await stream.read()
        if streams:
            return partial(self._send_events, _Events(stream, clock=self._clock), first, owner)
        return Content(_page(stream, first, limit=limit), status=200, headers={"content-type": JSON})

    async def _merged(self, request: Request, owner: Owner) -> ASGIApp:
        batch_id = batch_id_of(request)
        headers = {
            "content-type": "application/jsonl",
            "content-disposition": f'attachment; filename="{batch_id}_merged.jsonl"',
            "x-content-type-options": "nosniff",
        }
        return Content(await self._merger.open(owner.project_id, batch_id), status=200, headers=headers)

    async def _send_events(
        self, events: "_Events", first: list[PlacedResult], owner: Owner, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send events until the last line was sent, the client disconnects or its key becomes invalid."""
        ended = await first_of(
            events.send(first, send, client_state_of(scope)),
            wait_for_disconnect(receive),
            self._auth.wait_until_invalid(owner, clock=self._clock),
        )
        last = error_event(InvalidCredentials()) if ended == _KEY_INVALID else b""
        if ended != _DISCONNECTED:
            await send({"type": "http.response.body", "body": last, "more_body": False})


_, _DISCONNECTED, _KEY_INVALID = range(3)
"""The coroutine that ended first, which is the reason why no more events are sent."""


class _Events:
    """Sends the results of one batch as server-sent events."""

    def __init__(self, stream: ResultStream, *, clock: Clock) -> None:
        self._stream, self._clock = stream, clock
        self._sent_batch: tuple[object, ...] | None = None
        self._sent_at = -inf

    async def send(self, first: list[PlacedResult], send: Send, client_state: ClientState) -> None:
        """Send all lines, and return after the last one of a terminal batch or when the service shuts down."""
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        lines, quiet_since = first, self._clock.steady()
        while not client_state.closing:
            news = b"".join(map(_line_event, lines)) + (b"" if self._seconds_to_batch_event else self._batch_event())
            if self._stream.ended:
                await self._send_end(send, news)
                return
            if not news and self._clock.steady() - quiet_since >= _COMMENT_SECONDS:
                news = _COMMENT
            if news:
                await _send_part(send, news)
                quiet_since = self._clock.steady()
            if not lines:
                await self._clock.sleep(_POLL_SECONDS)
            lines = await self._read()

    async def _send_end(self, send: Send, news: bytes) -> None:
        """Send the last events. The one about the batch is not earlier than any other of them may be."""
        if self._batch_changed and self._seconds_to_batch_event:
            await _send_part(send, news)
            await self._clock.sleep(self._seconds_to_batch_event)
            news = self._batch_event()
        await _send_part(send, news + _END)

    async def _read(self) -> list[PlacedResult]:
        try:
            return await self._stream.read()
        except (StoreDown, ObjectsDown) as error:
            log.warning(
                "failed to read results for a stream, retrying",
                extra={"batch": self._stream.batch.id, "reason": str(error), "retry_in": _POLL_SECONDS},
            )
            return []

    @property
    def _seconds_to_batch_event(self) -> float:
        """The time until the next event about the batch may be sent."""
        return max(0.0, self._sent_at + _POLL_SECONDS - self._clock.steady())

    @property
    def _batch_state(self) -> tuple[object, ...]:
        batch = self._stream.batch
        return batch.status, batch.total, batch.completed, batch.failed

    @property
    def _batch_changed(self) -> bool:
        return self._batch_state != self._sent_batch

    def _batch_event(self) -> bytes:
        """Return an event with the batch if it changed since the last one."""
        if not self._batch_changed:
            return b""
        self._sent_batch, self._sent_at = self._batch_state, self._clock.steady()
        return b"event: batch\ndata: " + encode_json(BatchObject.from_record(self._stream.batch)) + b"\n\n"


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


def _line_event(result: PlacedResult) -> bytes:
    return b"event: line\nid: %b\ndata: %b\n" % (str(result.cursor).encode(), result.line)


async def _page(stream: ResultStream, lines: list[PlacedResult], *, limit: int) -> AsyncGenerator[bytes]:
    """Yield the envelope of a page, with the lines of one segment at a time."""
    last: Cursor | None = None
    size, rest = 0, limit
    yield b'{"object":"list","data":['
    while lines and rest and size < _MAX_PAGE_BYTES:
        shown = _fitting(lines[:rest], _MAX_PAGE_BYTES - size)
        yield (b"," if last else b"") + b",".join(result.line[:-1] for result in shown)
        last, rest = shown[-1].cursor, rest - len(shown)
        size += sum(len(result.line) for result in shown)
        lines = lines[len(shown) :] or await stream.read()
    has_more = bool(lines) or not stream.ended
    yield b'],"last_id":' + encode_json(None if last is None else str(last))
    yield b',"has_more":' + encode_json(has_more) + b"}"


def _fitting(lines: list[PlacedResult], size: int) -> list[PlacedResult]:
    """Return the first lines up to the one that reaches a size."""
    for n, result in enumerate(lines, 1):
        size -= len(result.line)
        if size <= 0:
            return lines[:n]
    return lines


def _limit(limit: int | None) -> int:
    if limit is None:
        return _DEFAULT_PAGE_LINES
    if limit < 1:
        raise InvalidRequest("limit must be a positive integer", code="invalid_limit", param="limit")
    return min(limit, _MAX_PAGE_LINES)


def _cursor(text: str | None) -> Cursor:
    if text is None:
        return START
    cursor = Cursor.parse(text)
    if cursor is None:
        raise InvalidRequest("after is not a cursor of this route", param="after")
    return cursor
