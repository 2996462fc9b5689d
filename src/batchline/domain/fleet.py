"""The reports that processes exchange: how busy each is, and each worker's share of an upstream's cap."""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from batchline.domain.progress import Pause

MAX_REPORTED_MODELS = 100
MAX_REPORTED_BATCHES = 1000
"""A report stays small, however many models and batches there are."""


class ModelQueue(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The lines of one model that could start at an upstream but for one reason."""

    reason: str
    """A WaitReason. It is text, so that an older process can read what a newer one reports."""
    lines: int
    until: int | None = None
    """The time at which the next one may start, in Unix seconds, for `retry_after`."""
    rate: float | None = None
    """The number that starts in a second, for `rate_limit`, if that is known."""


class UpstreamLoad(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One upstream as a process sees it."""

    in_flight: int = 0
    """Lines in flight."""
    sync_calls: int = 0
    """Synchronous calls in flight."""
    limit: int = 0
    """The number of lines that the process may have in flight, as its limiter measured."""
    pauses: Sequence[Pause] = ()
    """The pauses of the upstream and of its models."""
    hold: str | None = None
    """The reason why no line starts at all although the upstream is available: a WaitReason, or None."""
    queues: Mapping[str, ModelQueue] = {}
    """The lines that wait by model, of at most ``MAX_REPORTED_MODELS`` models."""
    projects: Mapping[str, int] = {}
    """Lines in flight by project, if ``queues`` is not empty."""
    rate: float | None = None
    """The number of lines that may start in a second; None while that is not limited."""
    attempts: int = 0
    """Attempts that ended since the process began."""
    attempt_seconds: float = 0.0
    """The sum of the seconds that these took."""


class Report(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The report of a process about itself."""

    owner: str
    runs_batches: bool
    """Whether the process runs batches, and so gets a share of every cap."""
    upstream_loads: Mapping[str, UpstreamLoad] = {}
    batches: Mapping[str, int] = {}
    """Lines in flight by batch."""
    retrying: Mapping[str, int] = {}
    """Lines that wait for their next attempt, by batch, of at most ``MAX_REPORTED_BATCHES`` batches."""
    unrecorded: Mapping[str, int] = {}
    """Lines that have an outcome which is not recorded yet, in the same way."""


class Member(Struct, frozen=True, kw_only=True):
    """A process as the other processes know it."""

    report: Report
    reserved: Mapping[str, int] = {}
    """The part of each cap that no other process may use, by upstream."""


class Share(Struct, frozen=True, kw_only=True):
    """A worker's part of a cap."""

    allowed: int
    """The number of lines that may be in flight."""
    reserved: int
    """The number of slots that no other worker may use: the share, or the lines in flight if these are more."""


def shares_of(report: Report, *, caps: Mapping[str, int], others: Sequence[Member]) -> dict[str, Share]:
    """Return a worker's share of every cap, by upstream."""
    workers = [report.owner, *(other.report.owner for other in others if other.report.runs_batches)]
    return {
        name: share_of(
            cap,
            workers=workers,
            owner=report.owner,
            in_flight=report.upstream_loads[name].in_flight,
            reserved_by_others=sum(other.reserved.get(name, 0) for other in others),
            sync_calls=sum(
                other.report.upstream_loads[name].sync_calls for other in others if name in other.report.upstream_loads
            ),
        )
        for name, cap in caps.items()
    }


def share_of(
    cap: int, *, workers: Sequence[str], owner: str, in_flight: int, reserved_by_others: int, sync_calls: int
) -> Share:
    """Return a worker's share of a cap.

    It is an even part of what synchronous calls leave, less what other workers still have in flight. A report does not
    say whose calls these are, so all of them take no more than half of the cap from lines.
    """
    shared = max((cap + 1) // 2, cap - sync_calls)
    rank = sorted(workers).index(owner)
    even = shared // len(workers) + (rank < shared % len(workers))
    allowed = max(0, min(even, cap - reserved_by_others))
    return Share(allowed=allowed, reserved=max(allowed, in_flight))
