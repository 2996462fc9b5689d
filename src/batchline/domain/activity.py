"""Derives from the reports of all processes what they do for a batch, and why its other lines wait (D11)."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from msgspec import Struct

from batchline.domain.fleet import ModelQueue, Report, UpstreamLoad
from batchline.domain.hold import main_error
from batchline.domain.models import Catalog
from batchline.domain.progress import Activity, LineErrors, Pause, message_of
from batchline.domain.records import Batch
from batchline.domain.states import BatchStatus
from batchline.domain.waiting import (
    HeldWait,
    QuarantineWait,
    QueueWait,
    RateLimitWait,
    RetryAfterWait,
    RetryWait,
    SlotsWait,
    StorageWait,
    UpstreamPause,
    Wait,
    WaitReason,
)


class _Server(Struct, frozen=True):
    """An upstream that serves a model of the batch, as each worker sees it."""

    model: str
    upstream: str
    loads: list[UpstreamLoad]

    def queues(self, reason: WaitReason) -> list[tuple[UpstreamLoad, ModelQueue]]:
        """Return the queues of the model that wait for this reason, each with the load that it is part of."""
        queues = [(load, load.queues.get(self.model)) for load in self.loads]
        return [(load, queue) for load, queue in queues if queue is not None and queue.reason == reason]


def activity_of(
    batch: Batch,
    models: Sequence[str],
    *,
    errors: Sequence[LineErrors] = (),
    catalog: Catalog,
    reports: Sequence[Report],
) -> Activity:
    """Return what all processes do for a batch that has lines of these models left, and what these lines wait for."""
    workers = [report for report in reports if report.runs_batches]
    servers = _servers_of(models, catalog, workers)
    upstreams = frozenset(server.upstream for server in servers)
    return Activity(
        in_flight=_in_flight(batch, reports),
        concurrency=sum(
            load.limit for worker in workers for name, load in worker.upstream_loads.items() if name in upstreams
        ),
        waiting_for=_held(batch, errors) or _wait_of(batch, servers, workers),
        upstreams=upstreams,
    )


def _servers_of(models: Iterable[str], catalog: Catalog, workers: Sequence[Report]) -> list[_Server]:
    return [
        _Server(model, name, [worker.upstream_loads[name] for worker in workers if name in worker.upstream_loads])
        for model in models
        for name in catalog.upstreams_of(model)
    ]


def _in_flight(batch: Batch, reports: Iterable[Report]) -> int:
    return sum(report.batches.get(batch.id, 0) for report in reports)


def _held(batch: Batch, errors: Sequence[LineErrors]) -> HeldWait | None:
    worst = main_error(errors)
    if not batch.is_held or worst is None:
        return None
    return HeldWait(code=worst.code, message=message_of(worst), since=batch.held_at or 0)


def _wait_of(batch: Batch, servers: Sequence[_Server], workers: Sequence[Report]) -> Wait | None:
    if batch.status is BatchStatus.VALIDATING:
        return QueueWait(workers=len(workers))
    if batch.status is not BatchStatus.IN_PROGRESS or batch.stop is not None:
        # The rest of a stopped batch never runs, so it waits for nothing.
        return None
    unrecorded = sum(worker.unrecorded.get(batch.id, 0) for worker in workers)
    waiting = batch.total - batch.completed - batch.failed - unrecorded - _in_flight(batch, workers)
    if waiting <= 0:
        return None
    retrying = sum(worker.retrying.get(batch.id, 0) for worker in workers)
    return (
        _pause(servers)
        or _hold(servers)
        or _retry_after(servers)
        # The next reasons hold back only lines that could start now.
        or (_rate_limit(servers) or _slots(servers, batch.project_id) if retrying < waiting else None)
        or (RetryWait(lines=retrying) if retrying else QueueWait(workers=len(workers)))
    )


def _pause(servers: Sequence[_Server]) -> UpstreamPause | None:
    """Return the longest pause of a model for which no worker finds any upstream available."""
    pause = _longest(_pause_of(model, group) for model, group in groupby(servers, key=lambda server: server.model))
    if pause is None:
        return None
    return UpstreamPause(upstream=pause.upstream, detail=pause.detail, since=pause.since, model=pause.model)


def _pause_of(model: str, servers: Iterable[_Server]) -> Pause | None:
    loads = [load for server in servers for load in server.loads]
    pauses = [_longest(pause for pause in load.pauses if pause.model in (None, model)) for load in loads]
    return _longest(pauses) if all(pauses) else None


def _longest(pauses: Iterable[Pause | None]) -> Pause | None:
    return min((pause for pause in pauses if pause is not None), key=lambda pause: pause.since, default=None)


def _hold(servers: Iterable[_Server]) -> StorageWait | QuarantineWait | None:
    held = {load.hold: server.upstream for server in servers for load in server.loads}
    if WaitReason.STORAGE in held:
        return StorageWait()
    return QuarantineWait(upstream=held[WaitReason.QUARANTINE]) if WaitReason.QUARANTINE in held else None


def _retry_after(servers: Iterable[_Server]) -> RetryAfterWait | None:
    """Return the longest such wait. It is over when the first worker may ask again."""
    waits = [
        RetryAfterWait(upstream=server.upstream, model=server.model, until=min(times))
        for server in servers
        if (times := [queue.until for _, queue in server.queues(WaitReason.RETRY_AFTER) if queue.until is not None])
    ]
    return max(waits, key=lambda wait: wait.until, default=None)


def _rate_limit(servers: Iterable[_Server]) -> RateLimitWait | None:
    server = _with_most_lines(servers, WaitReason.RATE_LIMIT)
    if server is None:
        return None
    rates = [queue.rate for _, queue in server.queues(WaitReason.RATE_LIMIT) if queue.rate is not None]
    return RateLimitWait(upstream=server.upstream, model=server.model, rate=round(sum(rates), 3) if rates else None)


def _slots(servers: Iterable[_Server], project_id: str) -> SlotsWait | None:
    """Return which slots are taken: those of the workers whose lines wait for one."""
    server = _with_most_lines(servers, WaitReason.SLOTS)
    if server is None:
        return None
    loads = [load for load, _ in server.queues(WaitReason.SLOTS)]
    in_flight = sum(sum(load.projects.values()) for load in loads)
    return SlotsWait(
        upstream=server.upstream,
        in_flight=in_flight,
        limit=sum(load.limit for load in loads),
        by_other_projects=in_flight - sum(load.projects.get(project_id, 0) for load in loads),
        sync_calls=sum(load.sync_calls for load in loads),
    )


def _with_most_lines(servers: Iterable[_Server], reason: WaitReason) -> _Server | None:
    """Return the upstream and model with the most lines that wait for a reason."""
    lines = [
        (sum(queue.lines for _, queue in queues), server) for server in servers if (queues := server.queues(reason))
    ]
    return max(lines, key=lambda pair: pair[0], default=(0, None))[1]
