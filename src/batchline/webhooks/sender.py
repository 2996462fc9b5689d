"""Sends one event to its receiver over HTTP.

It connects to the address that was checked and not to a name, so that a name cannot resolve to another address in
between. It uses no proxy of the environment, follows no redirect, and reads only the status of the answer.
"""

import asyncio
import socket
import ssl
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

from batchline import __version__
from batchline.domain.webhooks import TIMEOUT_SECONDS, Message, SendResult
from batchline.webhooks.addresses import refusal_of

_MAX_HEAD_BYTES = 16 * 1024
_MAX_INTERIM_ANSWERS = 8
_MAX_DETAIL_CHARACTERS = 300
_RESOLVER_THREADS = 32
"""Twice as many as webhooks are called at once, because a lookup goes on for a while after its attempt was given up."""


class HttpSender:
    """Sends events. ``allows_private`` says that receivers may be in private networks."""

    def __init__(
        self, *, allows_private: bool, timeout_seconds: float = TIMEOUT_SECONDS, tls: ssl.SSLContext | None = None
    ) -> None:
        self._allows_private, self._timeout_seconds = allows_private, timeout_seconds
        self._tls = tls
        # A project chooses the name, and so how slowly its name server answers. The event loop looks up only a few at a
        # time, and among them are the names of the upstreams and the database.
        self._resolver = ThreadPoolExecutor(_RESOLVER_THREADS, thread_name_prefix="webhook-names")

    async def send(self, message: Message) -> SendResult:
        """Send an event and return the result. A failure is a result too, and never an exception."""
        try:
            async with asyncio.timeout(self._timeout_seconds):
                return SendResult(status=await self._exchange(message))
        except _Refused as refused:
            return _failed(str(refused))
        except TimeoutError:
            return _failed(f"no answer within {self._timeout_seconds:g} s")
        except ssl.SSLError as error:
            return _failed(f"TLS failed: {error.reason or error}")
        except socket.gaierror as error:
            return _failed(f"the name cannot be resolved: {error.strerror}")
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            return _failed(f"the connection failed: {error or type(error).__name__}")

    async def _exchange(self, message: Message) -> int:
        parts = urlsplit(message.url)
        host, secure = parts.hostname or "", parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        address = await self._resolve(host, port, message, secure=secure)
        reader, writer = await asyncio.open_connection(
            address,
            port,
            ssl=self._context() if secure else None,
            server_hostname=host if secure else None,
            limit=_MAX_HEAD_BYTES,
        )
        try:
            self._check(writer.get_extra_info("peername")[0], message, secure=secure)
            writer.write(_request(message, parts.netloc, parts.path or "/", parts.query))
            await writer.drain()
            return await _read_status(reader)
        finally:
            writer.transport.abort()

    async def _resolve(self, host: str, port: int, message: Message, *, secure: bool) -> str:
        """Return an address of a host. Raise _Refused if any of its addresses is not allowed."""
        look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(self._resolver, look_up)
        addresses = [str(sockaddr[0]) for *_, sockaddr in found]
        for address in addresses:
            self._check(address, message, secure=secure)
        return addresses[0]

    def _check(self, address: str, message: Message, *, secure: bool) -> None:
        refusal = refusal_of(
            address, tls=secure, allows_loopback=message.by_operator, allows_private=self._allows_private
        )
        if refusal is not None:
            raise _Refused(refusal)

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


class _Refused(Exception):
    """The address of a receiver is not allowed."""


def _failed(detail: str) -> SendResult:
    return SendResult(detail=detail[:_MAX_DETAIL_CHARACTERS])


def _request(message: Message, authority: str, path: str, query: str) -> bytes:
    target = f"{path}?{query}" if query else path
    headers = {
        "host": authority,
        "user-agent": f"batchline/{__version__}",
        "content-length": str(len(message.body)),
        "connection": "close",
        **message.headers,
    }
    lines = [f"POST {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + message.body


async def _read_status(reader: asyncio.StreamReader) -> int:
    """Return the status of the final answer. Raise ValueError or EOFError if there is none."""
    for _ in range(_MAX_INTERIM_ANSWERS):
        version, _, rest = (await reader.readuntil(b"\r\n")).partition(b" ")
        status = int(rest[:3]) if rest[:3].isdigit() else 0
        if not version.startswith(b"HTTP/1.") or not 100 <= status <= 599:
            raise ValueError("the answer is not HTTP")
        if status >= 200:
            return status
        while await reader.readuntil(b"\r\n") != b"\r\n":
            pass
    raise ValueError(f"the receiver sent {_MAX_INTERIM_ANSWERS} interim answers (status 1xx) and no final one")
