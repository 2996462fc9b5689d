"""Wires the pipeline and the background tasks of one process to the adapters behind the ports.

A process has one or both of two roles. `WorkerRole` runs batches. `ApiRole` takes batches in and hands results out.
`batchline serve` and the simulation have both (`Engine`); on many machines a process has one of them.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from batchline.api.services import ApiServices
from batchline.domain.fleet import Report
from batchline.domain.held_bytes import HeldBytes
from batchline.domain.states import Stop
from batchline.loops.clock import CHECK_INTERVAL_SECONDS, ClockWatch
from batchline.loops.deliveries import Deliveries
from batchline.loops.expire import Expire
from batchline.loops.heartbeat import Heartbeat, SyncCallHeartbeat
from batchline.loops.key_usage import KeyUsage
from batchline.loops.lease_watch import NOTES_PER_LEASE, LeaseWatch
from batchline.loops.periodic import PeriodicTask
from batchline.loops.prune import Prune
from batchline.loops.rescue import Rescue
from batchline.loops.sweep import Sweep
from batchline.loops.worker import Worker
from batchline.pipeline.batch_ends import BatchEnds
from batchline.pipeline.budget import Budgets
from batchline.pipeline.cancel import Cancellation
from batchline.pipeline.check import InputCheck
from batchline.pipeline.create import BatchCreator
from batchline.pipeline.damage import DamageLog
from batchline.pipeline.download import Download
from batchline.pipeline.finalize import Finalizer
from batchline.pipeline.identity import IdentityCheck
from batchline.pipeline.inference import Inference
from batchline.pipeline.line_search import LineSearch
from batchline.pipeline.line_table import LineTable
from batchline.pipeline.load_history import SAMPLE_SECONDS, LoadHistory
from batchline.pipeline.merge import Merger
from batchline.pipeline.overview import UpstreamsReader
from batchline.pipeline.progress import ProgressReader, Workers
from batchline.pipeline.release import HoldRelease
from batchline.pipeline.repair import Repair
from batchline.pipeline.rerun import Rerun
from batchline.pipeline.results import ResultReader
from batchline.pipeline.reuse import ReuseStep
from batchline.pipeline.routing import SyncRouter
from batchline.pipeline.rows.conversion import TableConversion
from batchline.pipeline.storage_quota import StorageQuota
from batchline.pipeline.token_limit import TokenLimit
from batchline.pipeline.token_sample import TokenSampler
from batchline.pipeline.upload import Upload
from batchline.ports import (
    EngineQueue,
    EventSender,
    Fleet,
    Objects,
    Random,
    Store,
    SyncUpstream,
    Tracer,
    Validator,
    WatchedClock,
)
from batchline.settings import Settings
from batchline.telemetry.metrics import Metrics

_FLEET_INTERVAL_FACTOR = 3.0
"""With a shared store every worker looks for batches to finalize or expire, so each one looks less often. The worker
that records the last line of a batch finalizes it at once in any case."""


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """The seconds between two runs of each background task."""

    finalize_seconds: float = 1.0
    expire_seconds: float = 1.0
    prune_seconds: float = 10.0
    sweep_seconds: float = 3600.0
    key_usage_seconds: float = 5.0
    fleet_heartbeat_seconds: float = 2.0
    pool_heartbeat_seconds: float = 0.5
    deliver_seconds: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Context:
    """The settings and adapters that every part of a process uses.

    ``owner`` is the name of the process in leases. ``engine_queues`` has, by name, a reader for each upstream whose
    engine may report its queue length. ``held_bytes`` bounds the bytes of answers that the process holds. ``budgets``
    has the money that lines and synchronous calls may spend. ``damage_log`` is one for all parts, so that each damaged
    place is reported once. ``tracer`` is None unless batches are traced.
    """

    settings: Settings
    store: Store
    objects: Objects
    identity: IdentityCheck
    upstreams: Mapping[str, SyncUpstream]
    held_bytes: HeldBytes
    budgets: Budgets
    token_limit: TokenLimit
    router: SyncRouter
    clock: WatchedClock
    random: Random
    metrics: Metrics
    damage_log: DamageLog
    owner: str
    event_sender: EventSender
    tracer: Tracer | None = None
    engine_queues: Mapping[str, EngineQueue] = field(default_factory=dict)
    intervals: Intervals = Intervals()


class BackgroundTask(Protocol):
    """A task that runs in the background of a role."""

    async def run(self) -> None:
        """Run until cancelled."""


class LocalFleet(Fleet, Protocol):
    """The worker processes that this process started, and the caps it shares with them."""

    def live_owners(self) -> Sequence[str]:
        """Return the owner of every worker process that may hold leases. Safe to call from any thread."""


class WorkerRole:
    """Runs batches: the worker, and the tasks that finalize, rescue, expire and prune.

    ``validator`` makes a damaged work file again from its input file. ``shared`` says that other machines work on the
    same store and that caps are shared through it. ``local_fleet`` is the pool of worker processes on this machine, if
    there can be any.
    """

    def __init__(
        self, context: Context, *, validator: Validator, shared: bool = False, local_fleet: LocalFleet | None = None
    ) -> None:
        settings, store, clock, owner = context.settings, context.store, context.clock, context.owner
        intervals, factor = context.intervals, _FLEET_INTERVAL_FACTOR if shared else 1.0
        self.worker = new_worker(context, on_batch_left=self.on_batch_left)
        finalizer = _new_finalizer(
            context,
            validator=validator,
            on_batch_ended=self._on_batch_ended,
            on_work_available=self.worker.on_work_available,
        )
        self._finalize_task = PeriodicTask(
            "finalize", finalizer.step, every=factor * intervals.finalize_seconds, clock=clock
        )
        rescue = Rescue(
            store=store,
            clock=clock,
            owner=owner,
            live_owners=lambda: [owner, *(local_fleet.live_owners() if local_fleet is not None else ())],
            batch_ends=_batch_ends(context),
            on_work_available=self.worker.on_work_available,
        )
        self._rescue_task = PeriodicTask("rescue", rescue.step, every=settings.lease_seconds / 3, clock=clock)
        lease_watch = LeaseWatch(store=store, owner=owner, lease_seconds=settings.lease_seconds)
        expire = Expire(store=store, on_batch_stopped=self.on_batch_stopped)
        self._deliveries = new_deliveries(context)
        self._prune_task = _prune_task(context)
        self._tasks: list[BackgroundTask] = [
            clock_task(context),
            PeriodicTask("lease watch", lease_watch.step, every=settings.lease_seconds / NOTES_PER_LEASE, clock=clock),
            self._rescue_task,
            PeriodicTask("expire", expire.step, every=factor * intervals.expire_seconds, clock=clock),
            _sweep_task(context),
            self._finalize_task,
            self._prune_task,
            self._deliveries,
        ]
        self._heartbeat: Heartbeat | None = None
        if shared:
            self._share_caps(store, context, every=intervals.fleet_heartbeat_seconds)
        elif local_fleet is not None:
            self._share_caps(local_fleet, context, every=intervals.pool_heartbeat_seconds)

    def _share_caps(self, fleet: Fleet, context: Context, *, every: float) -> None:
        self._heartbeat = Heartbeat(fleet=fleet, worker=self.worker, settings=context.settings)
        every = min(every, context.settings.lease_seconds / 3)
        # The heartbeat runs first: an upstream with a cap gets nothing before this process knows its share.
        self._tasks.insert(0, PeriodicTask("heartbeat", self._heartbeat.step, every=every, clock=context.clock))

    async def run(self) -> None:
        """Run until ``stop``, and then until what is in flight is recorded."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(task.run()) for task in self._tasks]
            await self.worker.run()
            for task in tasks:
                task.cancel()
        if self._heartbeat is not None:
            await self._heartbeat.leave()

    def stop(self) -> None:
        """Start no further line, and let ``run`` end."""
        self.worker.stop()

    def on_work_available(self) -> None:
        """Look for new shards, and for a new batch that may reuse answers."""
        self.worker.on_work_available()
        self._finalize_task.wake()

    def on_batch_left(self) -> None:
        """Look for a batch to finalize: a worker holds no shard of one any more."""
        self._finalize_task.wake()

    def on_worker_exit(self) -> None:
        """Take over the shards and batches of a worker process that ended."""
        self._rescue_task.wake()
        self._finalize_task.wake()
        self.worker.on_work_available()

    def _on_batch_ended(self) -> None:
        self._prune_task.wake()
        self._deliveries.wake()

    def on_batch_stopped(self, batch_id: str, stop: Stop) -> None:
        """Start no further line of a batch that was cancelled or has expired."""
        self.worker.on_batch_stopped(batch_id, stop)
        self._finalize_task.wake()


def clock_task(context: Context) -> PeriodicTask:
    """Return the task that watches the clock of the machine."""
    watch = ClockWatch(clock=context.clock, metrics=context.metrics)
    return PeriodicTask("clock", watch.step, every=CHECK_INTERVAL_SECONDS, clock=context.clock)


def _prune_task(context: Context) -> PeriodicTask:
    prune = Prune(
        store=context.store,
        objects=context.objects,
        identity=context.identity,
        clock=context.clock,
        owner=context.owner,
        work_retention_seconds=context.settings.work_retention_seconds,
    )
    return PeriodicTask("prune", prune.step, every=context.intervals.prune_seconds, clock=context.clock)


def _sweep_task(context: Context) -> PeriodicTask:
    sweep = Sweep(
        store=context.store,
        objects=context.objects,
        identity=context.identity,
        clock=context.clock,
        metrics=context.metrics,
        max_percent=context.settings.sweep_max_percent,
    )
    return PeriodicTask("sweep", sweep.step, every=context.intervals.sweep_seconds, clock=context.clock)


def _new_finalizer(
    context: Context,
    *,
    validator: Validator,
    on_batch_ended: Callable[[], None],
    on_work_available: Callable[[], None],
) -> Finalizer:
    settings, store, objects, clock = context.settings, context.store, context.objects, context.clock
    damage_log = context.damage_log
    return Finalizer(
        store=store,
        objects=objects,
        repair=Repair(store=store, objects=objects, validator=validator, damage_log=damage_log, clock=clock),
        reuse_step=ReuseStep(
            store=store,
            objects=objects,
            validator=validator,
            catalog=settings.catalog,
            tariff=settings.tariff,
            clock=clock,
            metrics=context.metrics,
            max_age_seconds=settings.reuse_max_age_seconds,
            max_lines=settings.reuse_max_lines,
        ),
        damage_log=damage_log,
        clock=clock,
        random=context.random,
        owner=context.owner,
        lease_seconds=settings.lease_seconds,
        retention_seconds=settings.file_retention_seconds,
        batch_ends=_batch_ends(context),
        on_batch_ended=on_batch_ended,
        on_work_available=on_work_available,
    )


def _batch_ends(context: Context) -> BatchEnds:
    return BatchEnds(metrics=context.metrics, tracer=context.tracer)


def new_deliveries(context: Context) -> Deliveries:
    """Return the task that sends events to webhooks."""
    return Deliveries(
        store=context.store,
        sender=context.event_sender,
        clock=context.clock,
        metrics=context.metrics,
        every=context.intervals.deliver_seconds,
    )


def new_worker(context: Context, *, on_batch_left: Callable[[], None]) -> Worker:
    return Worker(
        store=context.store,
        objects=context.objects,
        upstreams=context.upstreams,
        held_bytes=context.held_bytes,
        token_limit=context.token_limit,
        router=context.router,
        clock=context.clock,
        random=context.random,
        owner=context.owner,
        settings=context.settings,
        budgets=context.budgets,
        metrics=context.metrics,
        damage_log=context.damage_log,
        on_batch_left=on_batch_left,
        engine_queues=context.engine_queues,
        tracer=context.tracer,
    )


class ApiRole:
    """Takes batches in and hands results out, through the services that the routes call.

    ``on_work_available`` and ``on_batch_stopped`` are called at once, so that a worker in this process need not wait
    for its next poll. ``delivers_events`` says that no worker in this process sends events to webhooks.
    """

    def __init__(
        self,
        context: Context,
        *,
        validator: Validator,
        workers: Workers,
        on_work_available: Callable[[], None] = lambda: None,
        on_batch_stopped: Callable[[str, Stop], None] = lambda _batch_id, _stop: None,
        sync_call_heartbeat: SyncCallHeartbeat | None = None,
        delivers_events: bool = True,
    ) -> None:
        clock, intervals = context.clock, context.intervals
        key_usage = KeyUsage(accounts=context.store, clock=clock)
        self._tasks: list[BackgroundTask] = [
            PeriodicTask("key usage", key_usage.step, every=intervals.key_usage_seconds, clock=clock)
        ]
        if delivers_events:
            self._tasks.append(new_deliveries(context))
        if sync_call_heartbeat is not None:
            every = intervals.fleet_heartbeat_seconds
            self._tasks.append(PeriodicTask("heartbeat", sync_call_heartbeat.step, every=every, clock=clock))
        self.services = _services(
            context,
            validator=validator,
            workers=workers,
            on_work_available=on_work_available,
            on_batch_stopped=on_batch_stopped,
            on_key_used=key_usage.mark,
        )

    def keep_load_history(self) -> None:
        """Take samples of the load while this runs, for the charts of the console."""
        step, clock = self.services.load_history.step, self.services.clock
        self._tasks.append(PeriodicTask("load history", step, every=SAMPLE_SECONDS, clock=clock))

    async def run(self) -> None:
        """Run the background tasks until cancelled."""
        async with asyncio.TaskGroup() as group:
            for task in self._tasks:
                group.create_task(task.run())


def _services(
    context: Context,
    *,
    validator: Validator,
    workers: Workers,
    on_work_available: Callable[[], None],
    on_batch_stopped: Callable[[str, Stop], None],
    on_key_used: Callable[[str], None],
) -> ApiServices:
    settings, store, objects, clock = context.settings, context.store, context.objects, context.clock
    damage_log = context.damage_log
    upload = _new_upload(context)
    creator = _new_creator(context, validator=validator, on_work_available=on_work_available)
    storage_quota = StorageQuota(settings.storage_limits, files=store)
    results = ResultReader(store=store, objects=objects, clock=clock, damage_log=damage_log)
    return ApiServices(
        settings=settings,
        store=store,
        objects=objects,
        identity=context.identity,
        upload=upload,
        storage_quota=storage_quota,
        download=Download(files=store, objects=objects, clock=clock, damage_log=damage_log),
        creator=creator,
        rerun=Rerun(store=store, objects=objects, upload=upload, creator=creator, clock=clock, damage_log=damage_log),
        results=results,
        line_table=LineTable(files=store, batches=store, objects=objects, reader=results, clock=clock),
        line_search=LineSearch(files=store, batches=store, objects=objects, clock=clock),
        merger=Merger(store=store, objects=objects, clock=clock, damage_log=damage_log),
        table_conversion=TableConversion(
            objects=objects,
            upload=upload,
            storage_quota=storage_quota,
            validator=validator,
            max_rows=settings.max_batch_lines,
        ),
        input_check=InputCheck(
            store=store,
            objects=objects,
            validator=validator,
            clock=clock,
            limits=settings.input_limits,
            catalog=settings.catalog,
            tariff=settings.tariff,
            token_sampler=TokenSampler(tokens=context.token_limit.tokens, catalog=settings.catalog),
            answered_names=frozenset(settings.embedded_names) if settings.embeds_model else None,
        ),
        cancellation=Cancellation(
            batches=store, clock=clock, batch_ends=_batch_ends(context), on_batch_stopped=on_batch_stopped
        ),
        hold_release=HoldRelease(batches=store, on_work_available=on_work_available),
        progress_reader=ProgressReader(batches=store, workers=workers, catalog=settings.catalog, clock=clock),
        load_history=LoadHistory(workers=workers, clock=clock),
        upstreams_reader=UpstreamsReader(workers=workers, names=context.upstreams),
        inference=_new_inference(context),
        upstreams=context.upstreams,
        on_key_used=on_key_used,
        metrics=context.metrics,
        clock=clock,
        random=context.random,
    )


def _new_upload(context: Context) -> Upload:
    settings = context.settings
    return Upload(
        files=context.store,
        objects=context.objects,
        clock=context.clock,
        random=context.random,
        owner=context.owner,
        lease_seconds=settings.lease_seconds,
        retention_seconds=settings.file_retention_seconds,
        max_bytes=settings.max_file_bytes,
    )


def _new_creator(context: Context, *, validator: Validator, on_work_available: Callable[[], None]) -> BatchCreator:
    settings = context.settings
    return BatchCreator(
        store=context.store,
        objects=context.objects,
        validator=validator,
        clock=context.clock,
        random=context.random,
        owner=context.owner,
        lease_seconds=settings.lease_seconds,
        window_seconds=settings.completion_window_seconds,
        limits=settings.input_limits,
        catalog=settings.catalog,
        tariff=settings.tariff,
        batch_ends=_batch_ends(context),
        on_work_available=on_work_available,
    )


def _new_inference(context: Context) -> Inference:
    settings = context.settings
    return Inference(
        upstreams=context.upstreams,
        catalog=settings.catalog,
        rules=settings.request_rules,
        token_limit=context.token_limit,
        ledger=context.store,
        budgets=context.budgets,
        tariff=settings.tariff,
        router=context.router,
        clock=context.clock,
        metrics=context.metrics,
        read_on_seconds=settings.request_timeout_seconds,
        read_on_bytes=settings.max_answer_bytes,
    )


class Engine:
    """Both roles in one process."""

    def __init__(
        self, context: Context, *, validator: Validator, shared: bool = False, local_fleet: LocalFleet | None = None
    ) -> None:
        self.worker_role = WorkerRole(context, validator=validator, shared=shared, local_fleet=local_fleet)
        worker = self.worker_role.worker
        self.api_role = ApiRole(
            context,
            validator=validator,
            workers=context.store if shared else worker if local_fleet is None else _FleetReports(worker, local_fleet),
            on_work_available=self.worker_role.on_work_available,
            on_batch_stopped=self.worker_role.on_batch_stopped,
            delivers_events=False,
        )

    async def run(self) -> None:
        """Run until ``stop``, and then until what is in flight is recorded."""
        async with asyncio.TaskGroup() as group:
            api_tasks = group.create_task(self.api_role.run())
            await self.worker_role.run()
            api_tasks.cancel()

    def stop(self) -> None:
        self.worker_role.stop()


class _FleetReports:
    """Reports this process as it is now, and its worker processes as of their last heartbeat."""

    def __init__(self, worker: Worker, local_fleet: LocalFleet) -> None:
        self._worker, self._local_fleet = worker, local_fleet

    async def reports(self) -> list[Report]:
        own = self._worker.report()
        return [own, *(report for report in await self._local_fleet.reports() if report.owner != own.owner)]
