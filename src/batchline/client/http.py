"""One request and its answer, over a connection of its own."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from urllib.parse import SplitResult, urlsplit

from batchline.client.errors import BrokenOff, Unreachable, refusal

Body = bytes | Iterable[bytes]

_STALL_SECONDS = 60.0
_MOST_BYTES = 16 * 1024 * 1024
"""Of an answer that is not a file."""


class Http:
    def __init__(self, *, locate: Callable[[], str], headers: Mapping[str, str]) -> None:
        """``locate`` tells, for each request anew, the address that paths are appended to."""
        self._locate, self._headers = locate, dict(headers)

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Body | None = None,
        headers: Mapping[str, str] | None = None,
        stall: float = _STALL_SECONDS,
    ) -> bytes:
        """The body of a success. Raises ClientError."""
        with self.open(method, path, body=body, headers=headers, stall=stall) as response:
            return _read(response)

    @contextmanager
    def open(
        self,
        method: str,
        path: str,
        *,
        body: Body | None = None,
        headers: Mapping[str, str] | None = None,
        stall: float = _STALL_SECONDS,
    ) -> Iterator[HTTPResponse]:
        """A success, to be read. Raises ClientError."""
        address = urlsplit(self._locate())
        with closing(_connected(address, stall)) as connection:
            try:
                connection.request(method, address.path + path, body=body, headers=self._headers | dict(headers or {}))
            except OSError as failure:
                # A server that refuses an upload answers before it has read all of it.
                response = _answer(connection, instead_of=failure)
            else:
                response = _answer(connection)
            with closing(response):
                _check(response)
                yield response


def _read(response: HTTPResponse) -> bytes:
    try:
        data = response.read(_MOST_BYTES)
    except (OSError, HTTPException) as failure:
        raise BrokenOff(f"the connection broke off: {_words(failure)}") from failure
    # A body that ends early is no error to the standard library when a number of bytes is asked for.
    if response.length:
        raise BrokenOff("the connection broke off in the middle of an answer")
    return data


def _connected(address: SplitResult, stall: float) -> HTTPConnection:
    kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
    connection = kind(address.hostname or "", address.port, timeout=stall)
    try:
        connection.connect()
    except (OSError, UnicodeError) as failure:
        raise Unreachable(_words(failure)) from failure
    return connection


def _answer(connection: HTTPConnection, *, instead_of: Exception | None = None) -> HTTPResponse:
    try:
        return connection.getresponse()
    except (OSError, HTTPException) as failure:
        raise BrokenOff(f"the connection broke off: {_words(instead_of or failure)}") from failure


def _check(response: HTTPResponse) -> None:
    if not 200 <= response.status < 300:
        headers = {name.lower(): value for name, value in response.headers.items()}
        raise refusal(response.status, response.reason, headers, _read(response))


def _words(failure: Exception) -> str:
    text = failure.strerror if isinstance(failure, OSError) else None
    return text or str(failure) or type(failure).__name__
