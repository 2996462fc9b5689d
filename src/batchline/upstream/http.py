"""The upstream over HTTP: one base URL, connections kept alive and taken up again, every failure a value."""

import asyncio
import re
import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeVar
from urllib.parse import quote, urlsplit

from msgspec import Struct

from batchline import __version__
from batchline.domain.replies import Fault, FaultKind, Reply
from batchline.ports import Clock
from batchline.upstream.connection import Connection, NeverTaken
from batchline.upstream.streaming import EventStream

T = TypeVar("T")

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
        self._site = _parse_site(base_url)
        own = _own_fields(api_key, headers or {})
        self._get_fields = _header_fields(self._site, own, _ACCEPT_JSON)
        self._post_fields = _header_fields(self._site, own, _SEND_JSON, _ACCEPT_JSON)
        self._stream_fields = _header_fields(self._site, own, _SEND_JSON, _ACCEPT_EVENTS)
        self._connect_timeout = min(connect_timeout, request_timeout)
        self._request_timeout = request_timeout
        self._max_answer_bytes = max_answer_bytes
        self._clock = clock
        self._tls = ssl.create_default_context() if self._site.tls else None
        self._idle: deque[Connection] = deque()
        self._open: set[Connection] = set()

    async def post(self, path: str, body: bytes) -> Reply:
        """One attempt. Every way it can go wrong is a Fault; cancelling it closes its connection."""
        return await self._ask(self._post(path, self._post_fields, body), self._exchange)

    async def get(self, path: str) -> Reply:
        target = (self._site.prefix + path).encode()
        return await self._ask(b"GET %b HTTP/1.1\r\n%b\r\n" % (target, self._get_fields), self._exchange)

    @asynccontextmanager
    async def stream(self, path: str, body: bytes) -> AsyncIterator[EventStream | Reply]:
        """As ``post``, where an answer of events is not waited for. Leaving before its end closes its connection."""
        answer = await self._ask(self._post(path, self._stream_fields, body), self._begin)
        if not isinstance(answer, EventStream):
            yield answer
            return
        try:
            yield answer
        finally:
            self._take_back(answer.connection)

    async def close(self) -> None:
        """Close every connection; requests still in flight end as broken."""
        connections = list(self._open)
        for connection in connections:
            connection.close()
        await asyncio.gather(*(connection.lost for connection in connections))

    def _post(self, path: str, fields: bytes, body: bytes) -> bytes:
        target = (self._site.prefix + path).encode()
        return b"POST %b HTTP/1.1\r\n%bContent-Length: %d\r\n\r\n%b" % (target, fields, len(body), body)

    async def _ask(self, request: bytes, exchange: Callable[[Connection, bytes, float], Awaitable[T]]) -> T | Fault:
        started = self._clock.steady()
        kept = self._take_idle(started)
        if kept is not None:
            try:
                return await exchange(kept, request, self._request_timeout)
            except NeverTaken:
                pass
        fresh = await self._connect()
        if isinstance(fresh, Fault):
            # Where a connection was just lost under the request, the server may have gone down over it.
            return fresh if kept is None else Fault(kind=FaultKind.BROKEN, detail=fresh.detail)
        return await exchange(fresh, request, started + self._request_timeout - self._clock.steady())

    async def _exchange(self, connection: Connection, request: bytes, timeout: float) -> Reply:
        reply = await connection.exchange(request, timeout=timeout)
        if connection.reusable:
            self._keep(connection)
        return reply

    async def _begin(self, connection: Connection, request: bytes, timeout: float) -> EventStream | Reply:
        stream = EventStream(connection, stall_seconds=self._request_timeout)
        reply = await connection.exchange(request, timeout=timeout, events=stream)
        if stream.begun:
            return stream
        self._take_back(connection)
        return reply

    def _take_back(self, connection: Connection) -> None:
        if connection.reusable:
            self._keep(connection)
        else:
            connection.close()

    async def _connect(self) -> Connection | Fault:
        site = self._site
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await asyncio.get_running_loop().create_connection(
                    self._new_connection, site.host, site.port, ssl=self._tls
                )
        except OSError as error:
            why = _explain(error, self._connect_timeout)
            return Fault(kind=FaultKind.REFUSED, detail=f"cannot connect to the upstream: {why}")
        self._open.add(connection)
        return connection

    def _new_connection(self) -> Connection:
        return Connection(clock=self._clock, max_answer_bytes=self._max_answer_bytes, on_lost=self._forget)

    def _take_idle(self, now: float) -> Connection | None:
        """The connection used last, so that those a smaller load does not need grow old and go."""
        while self._idle and now - self._idle[0].idle_since > _MAX_IDLE_SECONDS:
            self._idle.popleft().close()
        return self._idle.pop() if self._idle else None

    def _keep(self, connection: Connection) -> None:
        connection.idle_since = self._clock.steady()
        self._idle.append(connection)

    def _forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


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
