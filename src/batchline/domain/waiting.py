"""Defines the reasons why lines of a batch wait, as ``waiting_for`` in its progress names them (D11)."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

Count = Annotated[int, Meta(ge=0)]
Time = Annotated[int, Meta(description="Unix seconds.")]


class WaitReason(StrEnum):
    """The reasons, the most important first. If several apply to a batch, the first of them is given."""

    HELD = "held"
    UPSTREAM_PAUSED = "upstream_paused"
    STORAGE = "storage"
    QUARANTINE = "quarantine"
    RETRY_AFTER = "retry_after"
    RATE_LIMIT = "rate_limit"
    SLOTS = "slots"
    RETRYING = "retrying"
    QUEUED = "queued"


class _Wait(Struct, forbid_unknown_fields=True, tag_field="reason"):
    """One reason. Its name is the field ``reason``."""


class HeldWait(_Wait, tag=WaitReason.HELD.value):
    """Nearly all lines failed with one code, and the batch was created with `hold`. Release it or cancel it."""

    code: Annotated[str, Meta(description="The code that the lines failed with, as in BatchErrorLine.")]
    message: Annotated[str, Meta(description="The message of the first of them, cut to 300 characters.")]
    since: Time


class UpstreamPause(_Wait, tag=WaitReason.UPSTREAM_PAUSED.value):
    """The upstream is unavailable, or one model of it. No line starts before it answers again."""

    upstream: str
    detail: Annotated[
        str,
        Meta(
            description="Why it is unavailable, such as `refused`, `timeout` or `http_503`. With `http_401` or "
            "`http_403` it does not accept the credentials of this service: check the API key of the upstream."
        ),
    ]
    since: Time
    model: Annotated[str | None, Meta(description="The model that is paused, or null if the whole upstream is.")]


class StorageWait(_Wait, tag=WaitReason.STORAGE.value):
    """Answers must be stored before more lines start: storage is unavailable, or slower than the upstreams."""


class QuarantineWait(_Wait, tag=WaitReason.QUARANTINE.value):
    """The upstream crashed. The lines that may have caused it are tried first, in small groups."""

    upstream: str


class RetryAfterWait(_Wait, tag=WaitReason.RETRY_AFTER.value):
    """The upstream said when it may be asked again: with `Retry-After`, or with its rate-limit headers."""

    upstream: str
    model: str
    until: Annotated[int, Meta(description="Unix seconds at which the next line may start.")]


class RateLimitWait(_Wait, tag=WaitReason.RATE_LIMIT.value):
    """The upstream refuses lines (429) beyond this rate, or beyond a number in flight that comes to this rate."""

    upstream: str
    model: str
    rate: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="Lines per second that start now, of all batches; null if only the upstream knows it."),
    ]


class SlotsWait(_Wait, tag=WaitReason.SLOTS.value):
    """The upstream has as many requests in flight as it can use."""

    upstream: str
    in_flight: Annotated[Count, Meta(description="Lines in flight, of all batches.")]
    limit: Annotated[Count, Meta(description="How many requests may be in flight.")]
    by_other_projects: Annotated[Count, Meta(description="Those of the lines in flight that other projects have.")]
    sync_calls: Annotated[Count, Meta(description="Synchronous calls in flight, which take slots too.")]


class RetryWait(_Wait, tag=WaitReason.RETRYING.value):
    """Lines wait for their next attempt after a fault."""

    lines: Annotated[Count, Meta(description="How many lines of this batch wait for it.")]


class QueueWait(_Wait, tag=WaitReason.QUEUED.value):
    """Lines wait to be validated, or for a worker to take them."""

    workers: Annotated[Count, Meta(description="Worker processes that run. If there is none, start one.")]


Wait = (
    HeldWait
    | UpstreamPause
    | StorageWait
    | QuarantineWait
    | RetryAfterWait
    | RateLimitWait
    | SlotsWait
    | RetryWait
    | QueueWait
)


def stops_all_lines(wait: Wait | None) -> bool:
    """Return whether lines cannot run until something outside the batch changes: its end cannot be estimated."""
    return isinstance(wait, HeldWait | UpstreamPause | StorageWait)
