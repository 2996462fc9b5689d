"""The upstream over HTTP: one base URL, connections kept alive and taken up again, every failure a value."""

import asyncio
import re
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import quote, urlsplit

from msgspec import Struct

from batchline import __version__
from batchline.domain.replies import Fault, FaultKind, Reply
from batchline.ports import Clock
from batchline.upstream.connection import CLOSED, Events, UpstreamConnection, UpstreamExchange
from batchline.upstream.streaming import EventStream

_MAX_IDLE_SECONDS = 60.0
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
_GIVEN_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection", "content-type", "accept"})
_PATH_CHARACTERS = "/%:@!$&'()*+,;=~"
_SEND_JSON = "Content-Type: application/json"
_ACCEPT_JSON = "Accept: application/json"
_ACCEPT_EVENTS = "Accept: text/event-stream"


class HttpUpstream:
    """Takes as many requests at once as there are callers: who calls decides how much is in flight."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        headers: Mapping[str, str] | None = None,
        connect_timeout: float,
        request_timeout: float,
        max_answer_bytes: int,
        clock: Clock,
    ) -> None:
        """Raises ValueError when the URL, the key or a header cannot be used; the message never holds their values."""
        self._upstream_of = _parse_site(base_url)
        own = _own_fields(api_key, headers or {})
        self._get_fields = _header_fields(self._upstream_of, own, _ACCEPT_JSON)
        self._post_fields = _header_fields(self._upstream_of, own, _SEND_JSON, _ACCEPT_JSON)
        self._stream_fields = _header_fields(self._upstream_of, own, _SEND_JSON, _ACCEPT_EVENTS)
        self._post_heads: dict[str, bytes] = {}
        self._connect_timeout = min(connect_timeout, request_timeout)
        self._request_timeout = request_timeout
        self._max_answer_bytes = max_answer_bytes
        self._clock = clock
        self._tls = ssl.create_default_context() if self._upstream_of.tls else None
        self._idle: deque[UpstreamConnection] = deque()
        self._open: set[UpstreamConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    def post(self, path: str, body: bytes) -> UpstreamExchange:
        """One attempt, which has begun. Every way it can go wrong is a Fault; cancelling it closes its connection."""
        head = self._post_heads.get(path)
        if head is None:
            head = self._post_heads[path] = self._post_head(path, self._post_fields)
        return self._send(b"%b%d\r\n\r\n%b" % (head, len(body), body))

    async def get(self, path: str) -> Reply:
        target = (self._upstream_of.prefix + path).encode()
        return await self._send(b"GET %b HTTP/1.1\r\n%b\r\n" % (target, self._get_fields))

    @asynccontextmanager
    async def stream(self, path: str, body: bytes) -> AsyncIterator[EventStream | Reply]:
        """As ``post``, where an answer of events is not waited for. Leaving before its end closes its connection."""
        stream = EventStream(stall_seconds=self._request_timeout)
        head = self._post_head(path, self._stream_fields)
        try:
            reply = await self._send(b"%b%d\r\n\r\n%b" % (head, len(body), body), stream)
            yield stream if stream.begun else reply
        finally:
            stream.leave()

    async def close(self) -> None:
        """Close every connection; requests still in flight end as broken."""
        for connecting in self._connecting:
            connecting.cancel()
        connections = list(self._open)
        for connection in connections:
            connection.close()
        if ending := [*self._connecting, *(connection.lost for connection in connections)]:
            await asyncio.wait(ending)

    def _post_head(self, path: str, fields: bytes) -> bytes:
        """Up to the length of what is posted."""
        return b"POST %b HTTP/1.1\r\n%bContent-Length: " % ((self._upstream_of.prefix + path).encode(), fields)

    def _send(self, request: bytes, events: Events | None = None) -> UpstreamExchange:
        exchange = UpstreamExchange()
        exchange.request = request
        exchange.events = events
        exchange.started = self._clock.steady()
        kept = self._take_idle(exchange.started)
        if kept is None:
            self._connect_for(exchange, FaultKind.REFUSED)
        else:
            kept.send(exchange, timeout=self._request_timeout)
        return exchange

    def _send_again(self, exchange: UpstreamExchange) -> None:
        # Where a connection was just lost under the request, the server may have gone down over it.
        self._connect_for(exchange, FaultKind.BROKEN)

    def _connect_for(self, exchange: UpstreamExchange, refusal: FaultKind) -> None:
        connecting = asyncio.get_running_loop().create_task(self._send_afresh(exchange, refusal))
        exchange.abandon = connecting.cancel
        self._connecting.add(connecting)
        connecting.add_done_callback(partial(self._end_connecting, exchange))

    async def _send_afresh(self, exchange: UpstreamExchange, refusal: FaultKind) -> None:
        try:
            connection = await self._connect()
        except OSError as error:
            why = _explain(error, self._connect_timeout)
            exchange.set_result(Fault(kind=refusal, detail=f"cannot connect to the upstream: {why}"))
            return
        self._open.add(connection)
        connection.lost.add_done_callback(lambda _: self._open.discard(connection))
        connection.send(exchange, timeout=exchange.started + self._request_timeout - self._clock.steady())

    def _end_connecting(self, exchange: UpstreamExchange, connecting: asyncio.Task[None]) -> None:
        self._connecting.discard(connecting)
        if exchange.done():
            return
        if connecting.cancelled():
            exchange.set_result(CLOSED)
        elif (error := connecting.exception()) is not None:
            exchange.set_exception(error)

    async def _connect(self) -> UpstreamConnection:
        site = self._upstream_of
        async with asyncio.timeout(self._connect_timeout):
            _, connection = await asyncio.get_running_loop().create_connection(
                self._new_connection, site.host, site.port, ssl=self._tls
            )
        return connection

    def _new_connection(self) -> UpstreamConnection:
        return UpstreamConnection(
            clock=self._clock,
            max_answer_bytes=self._max_answer_bytes,
            idle=self._idle,
            on_never_taken=self._send_again,
        )

    def _take_idle(self, now: float) -> UpstreamConnection | None:
        """The connection used last, so that those a smaller load does not need grow old and go."""
        while self._idle and now - self._idle[0].idle_since > _MAX_IDLE_SECONDS:
            self._idle.popleft().close()
        while self._idle:
            if (connection := self._idle.pop()).reusable:
                return connection
        return None


class _Site(Struct, frozen=True, kw_only=True):
    tls: bool
    host: str
    port: int
    authority: str
    prefix: str
    """What stands before the paths that are posted to."""


def _parse_site(base_url: str) -> _Site:
    parts = urlsplit(base_url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("the upstream's URL must be like http://host:port/v1")
    default_port = 443 if parts.scheme == "https" else 80
    host = parts.hostname.encode("idna").decode()
    named = f"[{host}]" if ":" in host else host
    return _Site(
        tls=parts.scheme == "https",
        host=host,
        port=default_port if parts.port is None else parts.port,
        authority=named if parts.port is None else f"{named}:{parts.port}",
        prefix=quote(parts.path.rstrip("/").removesuffix("/v1"), safe=_PATH_CHARACTERS),
    )


def _own_fields(api_key: str | None, headers: Mapping[str, str]) -> list[str]:
    """What this upstream wants beside what all do."""
    if api_key is not None:
        if not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("the upstream's key must be printable ASCII")
        headers = {"Authorization": f"Bearer {api_key}", **headers}
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name) or name.lower() in _GIVEN_HEADERS:
            raise ValueError(f"a header cannot be called {name!r}")
        if not (value.isascii() and value.isprintable()):
            raise ValueError(f"the header {name} must be printable ASCII")
    return [f"{name}: {value}" for name, value in headers.items()]


def _header_fields(site: _Site, own: list[str], *media: str) -> bytes:
    fields = [f"Host: {site.authority}", *media, f"User-Agent: batchline/{__version__}", *own]
    return "".join(f"{field}\r\n" for field in fields).encode()


def _explain(error: OSError, connect_timeout: float) -> str:
    match error:
        case TimeoutError():
            return f"timed out after {connect_timeout:g} s"
        case ssl.SSLError():
            return f"TLS failed: {error}"
        case socket.gaierror():
            return f"the name cannot be resolved: {error.strerror}"
        case ConnectionRefusedError():
            return "connection refused"
        case ConnectionResetError():
            return "connection reset"
    return str(error) or type(error).__name__
