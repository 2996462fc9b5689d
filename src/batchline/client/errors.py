"""What can come of a request other than its answer.

::

    ClientError
    ├── Unreachable     nobody answered at the address
    ├── BrokenOff       the connection ended or stalled before the answer was whole
    ├── InputChanged    a file became shorter, or unreadable, while it was sent
    └── Refused         an answer that is no success
        ├── Denied      401, 403
        ├── OutOfFunds  429, insufficient_quota
        ├── Throttled   429 otherwise
        └── Trouble     408, 5xx: the same request may succeed later
"""

from collections.abc import Mapping

from msgspec import DecodeError, Struct
from msgspec.json import Decoder

_LONGEST_WAIT = 300.0
_LONGEST_TEXT = 500


class ClientError(Exception):
    retry_after: float | None = None


class Unreachable(ClientError):
    """Nobody answered at the address."""


class BrokenOff(ClientError):
    """The connection ended or stalled before the answer was whole."""


class InputChanged(ClientError):
    """A file became shorter, or unreadable, while it was sent."""


class RequestRefused(ClientError):
    def __init__(self, status: int, message: str, *, code: str | None, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.batch_id = headers.get("x-batch-id")
        """The batch that was persisted as failed."""
        self.retry_after = _seconds(headers.get("retry-after", ""))


class Denied(RequestRefused):
    pass


class OutOfFunds(RequestRefused):
    pass


class Throttled(RequestRefused):
    pass


class Trouble(RequestRefused):
    pass


class _Error(Struct):
    message: str
    code: str | None = None


class _Envelope(Struct):
    error: _Error


_envelope = Decoder(_Envelope)


def refusal(status: int, reason: str, headers: Mapping[str, str], body: bytes) -> RequestRefused:
    """The error that an answer stands for; proxies in between do not speak in envelopes."""
    try:
        told = _envelope.decode(body).error
    except DecodeError:
        told = _Error(message=_unspoken(status, reason, headers))
    return _kind(status, told.code)(status, told.message[:_LONGEST_TEXT], code=told.code, headers=headers)


def _kind(status: int, code: str | None) -> type[RequestRefused]:
    if status in {401, 403}:
        return Denied
    if status == 429:
        return OutOfFunds if code == "insufficient_quota" else Throttled
    return Trouble if status == 408 or status >= 500 else RequestRefused


def _unspoken(status: int, reason: str, headers: Mapping[str, str]) -> str:
    if 300 <= status < 400 and "location" in headers:
        return f"the server sends requests on to {headers['location']}"
    return f"the server answered {status} {reason}".rstrip()


def _seconds(text: str) -> float | None:
    return min(float(text), _LONGEST_WAIT) if text.isascii() and text.isdecimal() else None
