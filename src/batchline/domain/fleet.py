"""What processes that work together tell each other: how busy each is, and how an upstream's cap is shared."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from batchline.domain.models import Catalog
from batchline.domain.progress import Activity, Pause


class UpstreamLoad(Struct, frozen=True, kw_only=True):
    """One upstream as a process sees it."""

    in_flight: int = 0
    """Lines."""
    sync_calls: int = 0
    """Synchronous calls."""
    limit: int = 0
    pause: Pause | None = None


class Report(Struct, frozen=True, kw_only=True):
    """What a process is doing."""

    owner: str
    runs_batches: bool
    """Whether it runs batches, and so takes its share of every cap."""
    upstream_loads: Mapping[str, UpstreamLoad] = {}
    batches: Mapping[str, int] = {}
    """Lines in flight by batch."""


class Member(Struct, frozen=True, kw_only=True):
    """A process as the others know it."""

    report: Report
    reserved: Mapping[str, int] = {}
    """Of each cap, what nobody else may have."""


class Share(Struct, frozen=True, kw_only=True):
    """A worker's part of a cap."""

    allowed: int
    """How many may be in flight."""
    reserved: int
    """How many may not be given to others yet, as they still are."""


def shares_of(report: Report, *, caps: Mapping[str, int], others: Sequence[Member]) -> dict[str, Share]:
    """A worker's part of every cap, by upstream."""
    workers = [report.owner, *(other.report.owner for other in others if other.report.runs_batches)]
    return {
        name: share_of(
            cap,
            workers=workers,
            owner=report.owner,
            using=report.upstream_loads[name].in_flight,
            reserved_by_others=sum(other.reserved.get(name, 0) for other in others),
            live=sum(
                other.report.upstream_loads[name].sync_calls for other in others if name in other.report.upstream_loads
            ),
        )
        for name, cap in caps.items()
    }


def share_of(cap: int, *, workers: Sequence[str], owner: str, using: int, reserved_by_others: int, live: int) -> Share:
    """An even part of what calls that are waited for leave, and nothing that another still has in flight."""
    shared = max(0, cap - live)
    rank = sorted(workers).index(owner)
    even = shared // len(workers) + (rank < shared % len(workers))
    allowed = max(0, min(even, cap - reserved_by_others))
    return Share(allowed=allowed, reserved=max(allowed, using))


def activity(batch_id: str, models: Iterable[str], *, catalog: Catalog, reports: Sequence[Report]) -> Activity:
    """What is done for a batch by all who work, and what its lines of these models wait for."""
    names = {model: catalog.upstreams_of(model) for model in models}
    upstream_loads = [report.upstream_loads for report in reports if report.runs_batches]
    return Activity(
        in_flight=sum(report.batches.get(batch_id, 0) for report in reports),
        concurrency=sum(
            upstream_load.limit
            for seen in upstream_loads
            for name, upstream_load in seen.items()
            if any(name in serving for serving in names.values())
        ),
        pause=_longest(_pause_of(serving, upstream_loads) for serving in names.values()),
    )


def _pause_of(upstreams: Iterable[str], upstream_loads: Sequence[Mapping[str, UpstreamLoad]]) -> Pause | None:
    """Why lines that these upstreams serve wait: nobody finds one of them there."""
    pauses = [seen[name].pause for seen in upstream_loads for name in upstreams if name in seen]
    return _longest(pauses) if all(pauses) else None


def _longest(pauses: Iterable[Pause | None]) -> Pause | None:
    return min((pause for pause in pauses if pause is not None), key=lambda pause: pause.since, default=None)
