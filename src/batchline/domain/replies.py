"""What one attempt at the upstream came back with."""

from enum import StrEnum

from msgspec import Struct


class FaultKind(StrEnum):
    REFUSED = "refused"
    """No connection could be made: nothing of the line was sent."""
    BROKEN = "broken"
    """The connection ended before the answer did."""
    TIMEOUT = "timeout"
    GARBLED = "garbled"
    """What came is no HTTP answer, or one that is too large."""


class Answer(Struct, frozen=True, kw_only=True):
    status: int
    body: bytes
    request_id: str | None = None
    retry_after: float | None = None


class Fault(Struct, frozen=True, kw_only=True):
    kind: FaultKind
    detail: str


Reply = Answer | Fault
