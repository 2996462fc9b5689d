"""The reports that processes exchange: how busy each is, and each worker's share of an upstream's cap."""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from batchline.domain.models import Catalog
from batchline.domain.progress import Activity, Pause


class UpstreamLoad(Struct, frozen=True, kw_only=True):
    """One upstream as a process sees it."""

    in_flight: int = 0
    """Lines in flight."""
    sync_calls: int = 0
    """Synchronous calls in flight."""
    limit: int = 0
    """How many lines the process may have in flight, as its limiter measured."""
    pause: Pause | None = None


class Report(Struct, frozen=True, kw_only=True):
    """What a process reports about itself."""

    owner: str
    runs_batches: bool
    """Whether the process runs batches, and so gets a share of every cap."""
    upstream_loads: Mapping[str, UpstreamLoad] = {}
    batches: Mapping[str, int] = {}
    """Lines in flight by batch."""


class Member(Struct, frozen=True, kw_only=True):
    """A process as the other processes know it."""

    report: Report
    reserved: Mapping[str, int] = {}
    """The part of each cap that no other process may use, by upstream."""


class Share(Struct, frozen=True, kw_only=True):
    """A worker's part of a cap."""

    allowed: int
    """How many lines may be in flight."""
    reserved: int
    """How many slots no other worker may use: the share, or the lines still in flight if these are more."""


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

    It is an even part of what synchronous calls leave, less what other workers still have in flight.
    """
    shared = max(0, cap - sync_calls)
    rank = sorted(workers).index(owner)
    even = shared // len(workers) + (rank < shared % len(workers))
    allowed = max(0, min(even, cap - reserved_by_others))
    return Share(allowed=allowed, reserved=max(allowed, in_flight))


def activity_of(batch_id: str, models: Iterable[str], *, catalog: Catalog, reports: Sequence[Report]) -> Activity:
    """Return what all processes do for a batch, and what its lines of these models wait for."""
    upstreams_by_model = [catalog.upstreams_of(model) for model in models]
    loads_by_worker = [report.upstream_loads for report in reports if report.runs_batches]
    return Activity(
        in_flight=sum(report.batches.get(batch_id, 0) for report in reports),
        concurrency=sum(
            load.limit
            for loads in loads_by_worker
            for name, load in loads.items()
            if any(name in upstreams for upstreams in upstreams_by_model)
        ),
        pause=_longest(_pause_of(upstreams, loads_by_worker) for upstreams in upstreams_by_model),
    )


def _pause_of(upstreams: Iterable[str], loads_by_worker: Sequence[Mapping[str, UpstreamLoad]]) -> Pause | None:
    """Return why lines of these upstreams wait, or None if a worker finds one of them available."""
    pauses = [loads[name].pause for loads in loads_by_worker for name in upstreams if name in loads]
    return _longest(pauses) if all(pauses) else None


def _longest(pauses: Iterable[Pause | None]) -> Pause | None:
    return min((pause for pause in pauses if pause is not None), key=lambda pause: pause.since, default=None)
