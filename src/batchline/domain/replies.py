"""The reply of an upstream to one attempt: an HTTP answer, or a fault."""

from enum import StrEnum

from msgspec import Struct

from batchline.domain.rate_limits import RateLimits


class FaultKind(StrEnum):
    REFUSED = "refused"
    """No connection was made: nothing of the line was sent."""
    BROKEN = "broken"
    """The connection ended before the answer was complete."""
    TIMEOUT = "timeout"
    GARBLED = "garbled"
    """The bytes received are not an HTTP answer, or the answer is too large."""
    UNREADABLE = "unreadable"
    """The upstream answered with success, but compressed, and it cannot be decompressed. It would do so again."""


class Answer(Struct, frozen=True, kw_only=True, weakref=True):
    """An HTTP answer with any status."""

    status: int
    body: bytes
    request_id: str | None = None
    retry_after: float | None = None
    rate_limits: RateLimits | None = None
    """The rate limits that the headers mention; None if they mention none, or if the upstream has no headers."""


class Fault(Struct, frozen=True, kw_only=True):
    """No usable answer arrived."""

    kind: FaultKind
    detail: str
    answer_bytes: int = 0
    """The bytes that a success over the limit has at least; 0 for every other fault."""


Reply = Answer | Fault
