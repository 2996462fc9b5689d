"""The errors that a request can end with.

::

    ClientError
    ├── Unreachable          no connection to the address
    ├── BrokenOff            the connection ended or stalled before the answer was complete
    ├── InputChanged         a file became shorter, or unreadable, while it was sent
    └── RequestRefused       an answer with another status than 2xx
        ├── Denied           401, 403
        ├── OutOfFunds       429 with the code insufficient_quota
        ├── Throttled        429 with another code
        └── ServerTrouble    408, 5xx: the same request may succeed later
"""

from collections.abc import Mapping

from msgspec import DecodeError, Struct
from msgspec.json import Decoder

_MAX_RETRY_AFTER_SECONDS = 300.0
_MAX_MESSAGE_LENGTH = 500


class ClientError(Exception):
    """The base of all errors of the client."""

    retry_after: float | None = None
    """Seconds to wait before the next attempt, if the server said so."""


class Unreachable(ClientError):
    """No connection to the address could be made."""


class BrokenOff(ClientError):
    """The connection ended or stalled before the answer was complete."""


class InputChanged(ClientError):
    """A file became shorter, or unreadable, while it was sent."""


class RequestRefused(ClientError):
    """The server answered with another status than 2xx."""

    def __init__(self, status: int, message: str, *, code: str | None, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.batch_id = headers.get("x-batch-id")
        """The id of the batch that the server recorded as failed, if there is one."""
        self.file_bytes = _parse_size(headers.get("content-range", ""))
        """The size of the file, if a range was refused because it begins behind its end."""
        self.retry_after = _parse_seconds(headers.get("retry-after", ""))


class Denied(RequestRefused):
    """The credentials are wrong or missing."""


class OutOfFunds(RequestRefused):
    """The organization has no balance and no credits left."""


class Throttled(RequestRefused):
    """The server asks for fewer requests."""


class ServerTrouble(RequestRefused):
    """The server could not handle the request now; the same request may succeed later."""


class _ErrorBody(Struct):
    message: str
    code: str | None = None


class _Envelope(Struct):
    error: _ErrorBody


_envelope = Decoder(_Envelope)


def refusal(status: int, reason: str, headers: Mapping[str, str], body: bytes) -> RequestRefused:
    """Return the error for an answer. A proxy's answer may have no error body; then the status is the message."""
    try:
        error = _envelope.decode(body).error
    except (DecodeError, UnicodeDecodeError, RecursionError):
        error = _ErrorBody(message=_describe(status, reason, headers))
    return _error_class(status, error.code)(
        status, error.message[:_MAX_MESSAGE_LENGTH], code=error.code, headers=headers
    )


def _error_class(status: int, code: str | None) -> type[RequestRefused]:
    if status in {401, 403}:
        return Denied
    if status == 429:
        return OutOfFunds if code == "insufficient_quota" else Throttled
    return ServerTrouble if status == 408 or status >= 500 else RequestRefused


def _describe(status: int, reason: str, headers: Mapping[str, str]) -> str:
    if 300 <= status < 400 and "location" in headers:
        return f"the server redirects to {headers['location']}; use that address"
    return f"the server answered {status} {reason}".rstrip()


def _parse_size(text: str) -> int | None:
    """Return the size in the Content-Range of an answer with 416, such as ``bytes */100``."""
    size = text.removeprefix("bytes */")
    return int(size) if size != text and size.isascii() and size.isdecimal() else None


def _parse_seconds(text: str) -> float | None:
    return min(float(text), _MAX_RETRY_AFTER_SECONDS) if text.isascii() and text.isdecimal() else None
