"""Runs batches: claims shards while slots are free, renews their leases, polls for stopped batches, and shuts down."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby

from batchline.domain.chat import named_model
from batchline.domain.engine_queue import QueueLength
from batchline.domain.errors import ObjectsDown, StoreDown
from batchline.domain.fleet import MAX_REPORTED_BATCHES, Report
from batchline.domain.held_bytes import HeldBytes
from batchline.domain.models import DEFAULT_UPSTREAM, Model, lanes_of
from batchline.domain.records import SHARED_LANE, Balances, Lane
from batchline.domain.states import Stop
from batchline.loops.engine_queue_watch import EngineQueueWatch
from batchline.pipeline.budget import Budgets
from batchline.pipeline.claim import Claims
from batchline.pipeline.damage import DamageLog
from batchline.pipeline.dispatch.circuit_breaker import Breakers
from batchline.pipeline.dispatch.dispatcher import Dispatcher
from batchline.pipeline.dispatch.limiter import Limiter
from batchline.pipeline.dispatch.waiting import DISPATCH_REASONS
from batchline.pipeline.job import HeldBatch, HeldShard, Job
from batchline.pipeline.record import Recorder
from batchline.pipeline.routing import SyncRouter
from batchline.pipeline.token_limit import TokenLimit
from batchline.ports import BatchSignal, EngineQueue, Objects, Random, ShardStore, StoreClock, Tracer, Upstream
from batchline.settings import Settings
from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.05, 2.0
"""The time between two claims while there is nothing to claim: the first, and the longest."""
_SIGNAL_POLL_SECONDS = 1.0
_DRAIN_POLL_SECONDS = 0.05
_MIN_FINAL_FLUSH_SECONDS = 5.0
"""The least time that the recorder gets for its last flush, if the shutdown grace is shorter."""
_MAX_HELD_BYTES = 64 * 1024 * 1024
"""The most bytes of lines that are held to run: enough for any upstream, and little for a machine. Beyond this, each
project may have one shard."""
_MAX_LINES_PER_TURN = 256
"""The number of lines that are passed to dispatchers before other tasks may run. Each is checked, and answers wait
meanwhile. In such a turn up to 64 answers are handled, and fewer lines than that would never be ready ahead."""


class Worker:
    """The worker of a process. ``on_batch_left`` is called when it holds no shard of a batch any more."""

    def __init__(
        self,
        *,
        store: ShardStore,
        objects: Objects,
        upstreams: Mapping[str, Upstream],
        held_bytes: HeldBytes,
        token_limit: TokenLimit,
        router: SyncRouter,
        clock: StoreClock,
        random: Random,
        owner: str,
        settings: Settings,
        budgets: Budgets,
        metrics: Metrics,
        damage_log: DamageLog,
        on_batch_left: Callable[[], None],
        engine_queues: Mapping[str, EngineQueue] = {},
        tracer: Tracer | None = None,
    ) -> None:
        self._store, self._clock, self._random = store, clock, random
        self._owner = owner
        self._on_batch_left = on_batch_left
        self._lease_seconds, self._grace_seconds = settings.lease_seconds, settings.shutdown_grace_seconds
        self._claim_loop_woken = asyncio.Event()
        self._work_available = asyncio.Event()
        """Set if a claim may succeed now although the last one did not. The claim loop does not wait for its poll."""
        self._stopping = asyncio.Event()
        self._catalog = settings.catalog
        self._budgets = budgets
        self._claims = Claims(
            store=store,
            objects=objects,
            budgets=self._budgets,
            clock=clock,
            owner=owner,
            lease_seconds=self._lease_seconds,
            damage_log=damage_log,
        )
        self._recorder = Recorder(
            store=store,
            objects=objects,
            claims=self._claims,
            clock=clock,
            owner=owner,
            held_bytes=held_bytes,
            metrics=metrics,
            on_recorded=self._on_recorded,
            on_batch_left=on_batch_left,
        )
        self._dispatchers = {
            name: Dispatcher(
                name,
                upstream=upstream,
                catalog=self._catalog,
                token_limit=token_limit,
                tariff=settings.tariff,
                recorder=self._recorder,
                breakers=Breakers(
                    name,
                    clock=clock,
                    random=random,
                    patience_seconds=settings.upstream_patience_seconds,
                    metrics=metrics,
                ),
                policy=settings.retry_policy,
                limiter=Limiter(cap=settings.cap(name)),
                clock=clock,
                random=random,
                metrics=metrics,
                sync_calls=router.calls(name),
                on_line_dropped=self._claim_loop_woken.set,
                on_demand=self._wake_claim_loop,
                find_alternative=partial(self._find_alternative, name),
                tracer=tracer,
            )
            for name, upstream in upstreams.items()
        }
        self._queue_watches = [
            EngineQueueWatch(
                name,
                queue=queue,
                clock=clock,
                is_busy=partial(self._is_busy, name),
                on_queue_length=self._on_queue_length,
            )
            for name, queue in engine_queues.items()
            if name in self._dispatchers
        ]
        for name, dispatcher in self._dispatchers.items():
            router.watch(name, on_call_ended=dispatcher.pump, on_answer=dispatcher.on_real_answers)
            _register_gauges(name, dispatcher, metrics)
        metrics.watch(
            shards_held=lambda: len(self._claims.shards),
            held_bytes=lambda: held_bytes.total,
        )

    async def run(self) -> None:
        """Run until ``stop``, and then until the lines in flight are recorded."""
        async with asyncio.TaskGroup() as group:
            dispatching = [group.create_task(dispatcher.run()) for dispatcher in self._dispatchers.values()]
            recording = group.create_task(self._recorder.run())
            claiming = group.create_task(self._claim_loop())
            polling = group.create_task(self._poll_signals())
            renewing = group.create_task(self._renew_leases())
            watching = [group.create_task(watch.run()) for watch in self._queue_watches]
            await self._stopping.wait()
            await claiming
            await self._wait_for_in_flight()
            for task in dispatching:
                task.cancel()
            await self._wait_for_recorder(recording)
            for task in (polling, renewing, *watching):
                task.cancel()
            await self._release_all()

    def _is_busy(self, upstream: str) -> bool:
        return self._dispatchers[upstream].in_flight > 0

    def _on_queue_length(self, upstream: str, length: QueueLength) -> None:
        self._dispatchers[upstream].on_queue_length(length)

    def stop(self) -> None:
        """Claim and start nothing more; ``run`` ends when the lines in flight are recorded."""
        self._stopping.set()
        self._wake_claim_loop()
        for dispatcher in self._dispatchers.values():
            dispatcher.drain()

    def on_work_available(self) -> None:
        """Claim now: there are new shards."""
        self._wake_claim_loop()

    def on_batch_stopped(self, batch_id: str, stop: Stop) -> None:
        """Start no further line of a batch that was cancelled or has expired."""
        batch = self._claims.note_stop(batch_id, stop)
        if batch is not None:
            self._stop_batch(batch, stop)
        self._claim_loop_woken.set()

    @property
    def upstreams(self) -> list[str]:
        return list(self._dispatchers)

    async def reports(self) -> list[Report]:
        """Return the report of this process alone."""
        return [self.report()]

    def report(self) -> Report:
        """Return the report of this process."""
        return Report(
            owner=self._owner,
            runs_batches=True,
            upstream_loads={name: dispatcher.upstream_load for name, dispatcher in self._dispatchers.items()},
            batches=sum((dispatcher.in_flight_by_batch for dispatcher in self._dispatchers.values()), Counter()),
            retrying=_largest(dispatcher.retrying_by_batch for dispatcher in self._dispatchers.values()),
            unrecorded=_largest([self._recorder.unrecorded]),
        )

    def set_cap(self, upstream: str, cap: int) -> None:
        """Set the most lines that may be in flight to an upstream."""
        self._dispatchers[upstream].set_cap(cap)

    @property
    def _in_flight(self) -> int:
        return sum(dispatcher.in_flight for dispatcher in self._dispatchers.values())

    def _stop_batch(self, batch: HeldBatch, stop: Stop) -> None:
        for dispatcher in self._dispatchers.values():
            dispatcher.stop_batch(batch, stop)

    def _wake_claim_loop(self) -> None:
        """Claim at once: a dispatcher wants more lines, there are new shards, or the worker stops."""
        self._work_available.set()
        self._claim_loop_woken.set()

    def _on_recorded(self) -> None:
        self._claim_loop_woken.set()
        for dispatcher in self._dispatchers.values():
            dispatcher.pump()

    async def _claim_loop(self) -> None:
        """Claim while there is work. Without any, poll less and less often, until ``_wake_claim_loop`` is called."""
        poll_seconds, next_poll = _MIN_POLL_SECONDS, 0.0
        while not self._stopping.is_set():
            self._claim_loop_woken.clear()
            await self._release_stopped()
            work_available = self._work_available.is_set()
            if work_available or self._clock.steady() >= next_poll:
                if await self._claim():
                    poll_seconds, next_poll = _MIN_POLL_SECONDS, 0.0
                    continue
                poll_seconds = _MIN_POLL_SECONDS if work_available else min(_MAX_POLL_SECONDS, poll_seconds * 2)
                next_poll = self._clock.steady() + poll_seconds * self._random.uniform(0.5, 1.0)
            await self._wait_until_woken(next_poll - self._clock.steady())

    async def _claim(self) -> bool:
        self._work_available.clear()
        wanted = max(dispatcher.wanted_lines for dispatcher in self._dispatchers.values())
        if wanted <= 0:
            return False
        space = _MAX_HELD_BYTES - sum(dispatcher.held_bytes for dispatcher in self._dispatchers.values())
        without = self._satisfied_lanes()
        if space <= 0:
            # The lines that are held may hang. A project that has none here gets one shard all the same.
            space, without = 1, without + self._lanes_held()
        try:
            jobs = await self._claims.claim(lines=wanted, bytes=space, without=without)
        except (StoreDown, ObjectsDown) as error:
            log.warning("failed to claim shards, retrying", extra={"reason": str(error)})
            return False
        for start in range(0, len(jobs), _MAX_LINES_PER_TURN):
            self._distribute(jobs[start : start + _MAX_LINES_PER_TURN])
            await self._clock.sleep(0)
        return bool(jobs)

    def _satisfied_lanes(self) -> list[Lane]:
        """Return the lanes from which nothing is claimed.

        Their lines would only wait here, while another worker could run them or this one could run others.
        """
        lanes: list[Lane] = []
        for model in self._catalog.served():
            names = (DEFAULT_UPSTREAM,) if model is None else model.upstreams
            serving = [self._dispatchers[name] for name in names]
            available = [dispatcher for dispatcher in serving if not dispatcher.paused] or serving
            demanding = [dispatcher for dispatcher in available if dispatcher.wanted_lines]
            if not demanding:
                lanes += lanes_of(model)
            else:
                lanes += set.intersection(*(_lanes_of_model(each.satisfied_lanes, model) for each in demanding))
        return lanes

    def _lanes_held(self) -> list[Lane]:
        """Return the lanes of the projects that have lines here."""
        projects = set[str]().union(*(dispatcher.projects for dispatcher in self._dispatchers.values()))
        return [Lane(model=None, project_id=project_id) for project_id in sorted(projects)]

    def _distribute(self, jobs: list[Job]) -> None:
        """Add each job to the least busy upstream of its model.

        A job whose model no upstream serves goes to any of them, which ends it with an error.
        """
        for model, group in groupby(jobs, key=_model_of):
            serving = [self._dispatchers[name] for name in self._serving(model)]
            available = [dispatcher for dispatcher in serving if not dispatcher.paused] or serving
            if len(available) == 1:
                available[0].add(group)
                continue
            for job in group:
                min(available, key=lambda dispatcher: dispatcher.load).add([job])

    def _serving(self, model: str) -> list[str]:
        """Return the upstreams that the jobs of a model go to."""
        return [name for name in self._catalog.upstreams_of(model) if name in self._dispatchers] or [*self._dispatchers]

    def _find_alternative(self, name: str, job: Job) -> Dispatcher | None:
        """Return the least busy of the other upstreams that serve a job's model and are not paused."""
        others = [self._dispatchers[other] for other in job.model.upstreams if other != name]
        return min(
            (dispatcher for dispatcher in others if not dispatcher.is_paused(job.model.id)),
            key=lambda dispatcher: dispatcher.load,
            default=None,
        )

    def _lend_probe_jobs(self) -> None:
        """Give each paused upstream that has no job one to be probed with, from another that runs its models."""
        for name, dispatcher in self._dispatchers.items():
            if dispatcher.needs_probe_job:
                others = (other.lend_job(name) for other in self._dispatchers.values() if other is not dispatcher)
                job = next((job for job in others if job is not None), None)
                if job is not None:
                    dispatcher.accept(job)

    async def _wait_until_woken(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._claim_loop_woken.wait()

    async def _release_stopped(self) -> None:
        """Release the shards of stopped and held batches once no line of them is in flight or unrecorded."""
        released = [
            shard
            for batch in list(self._claims.batches.values())
            if batch.pending_lines == 0 and not self._recorder.holds(batch)
            for shard in batch.shards.values()
            if batch.stop is not None or shard.withheld
        ]
        if released:
            await self._try_to_release(released)
            self._on_batch_left()

    async def _release_without_share(self) -> None:
        """Release the shards whose upstreams this worker has no share of, so that a worker with a share can run them.

        Shards of batches with lines in flight or unrecorded are released later.
        """
        in_flight = {
            batch_id for dispatcher in self._dispatchers.values() for batch_id in dispatcher.in_flight_by_batch
        }
        released = [
            shard
            for batch in self._claims.batches.values()
            if batch.id not in in_flight and not self._recorder.holds(batch)
            for shard in batch.shards.values()
            if all(self._dispatchers[name].cap == 0 for name in self._serving(shard.model))
        ]
        for shard in released:
            shard.lost = True
        for dispatcher in self._dispatchers.values() if released else ():
            dispatcher.drop_lost()
        await self._try_to_release(released)

    async def _poll_signals(self) -> None:
        while True:
            await self._clock.sleep(_SIGNAL_POLL_SECONDS)
            read_at = self._budgets.sequence
            try:
                signals = await self._store.signals(list(self._claims.batches))
                await self._claims.refresh_days(self._day_limits(signals))
            except StoreDown as error:
                log.warning("failed to poll for cancelled batches, retrying", extra={"reason": str(error)})
                continue
            for signal in signals:
                self._apply_signal(signal, read_at=read_at)
            await self._release_without_share()
            self._lend_probe_jobs()
            for dispatcher in self._dispatchers.values():
                dispatcher.on_funds_changed()
            self._claim_loop_woken.set()

    def _day_limits(self, signals: Sequence[BatchSignal]) -> dict[str, int | None]:
        """Return the daily budgets of the projects of the held batches."""
        held = self._claims.batches
        return {held[signal.batch_id].project_id: signal.daily_budget for signal in signals if signal.batch_id in held}

    def _apply_signal(self, signal: BatchSignal, *, read_at: int) -> None:
        batch = self._claims.batches.get(signal.batch_id)
        if batch is None:
            return
        batch.budget.update(Balances(funds=signal.funds, cost_left=signal.cost_left), read_at=read_at)
        if signal.stop is not None:
            self._stop_batch(batch, signal.stop)
        elif signal.held:
            self._withhold(batch)
        elif signal.key_revoked and not batch.key_revoked:
            for dispatcher in self._dispatchers.values():
                dispatcher.revoke_key(batch)

    def _withhold(self, batch: HeldBatch) -> None:
        """Start no further line of a held batch. Its shards are released when none of its lines is in flight."""
        shards = [shard for shard in batch.shards.values() if not shard.withheld]
        if not shards:
            return
        log.warning(
            "batch is held because nearly all of its lines fail, waiting until it is released or cancelled",
            extra={"batch": batch.id},
        )
        for shard in shards:
            shard.withheld = True
        for dispatcher in self._dispatchers.values():
            dispatcher.drop_withheld()

    async def _renew_leases(self) -> None:
        while True:
            await self._clock.sleep(self._lease_seconds / 3)
            try:
                lost = await self._claims.renew()
            except StoreDown as error:
                log.warning("failed to renew leases, retrying", extra={"reason": str(error)})
                continue
            if lost:
                log.warning("leases lost to another worker, dropping their lines", extra={"shards": len(lost)})
            for dispatcher in self._dispatchers.values():
                dispatcher.drop_lost()

    async def _wait_for_in_flight(self) -> None:
        until = self._clock.steady() + self._grace_seconds
        while self._in_flight and self._clock.steady() < until:
            await self._clock.sleep(_DRAIN_POLL_SECONDS)

    async def _wait_for_recorder(self, recording: "asyncio.Task[None]") -> None:
        """Wait for the last flush, for a limited time.

        If storage is unavailable, the worker that takes the leases over runs the unrecorded lines again.
        """
        self._recorder.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(self._grace_seconds, _MIN_FINAL_FLUSH_SECONDS)):
                await recording

    async def _release_all(self) -> None:
        await self._try_to_release(self._claims.shards)

    async def _try_to_release(self, shards: list[HeldShard]) -> None:
        try:
            await self._claims.release(shards)
        except StoreDown as error:
            log.warning("failed to release leases, leaving them to expire", extra={"reason": str(error)})


def _model_of(job: Job) -> str:
    """Return the model of a job's shard; in the shared lane each line has its own."""
    return job.shard.model or named_model(job.line.body) or SHARED_LANE


def _lanes_of_model(lanes: set[Lane], model: Model | None) -> set[Lane]:
    """Return the lanes of a model among those of all models; None stands for every model."""
    if model is None:
        return lanes
    return {Lane(model=model.id, project_id=lane.project_id) for lane in lanes if lane.model in (None, model.id)}


def _largest(counts_by_batch: Iterable[Counter[str]]) -> dict[str, int]:
    """Return the sum of counts by batch, without the smallest if there are too many for a report."""
    return dict(sum(counts_by_batch, Counter[str]()).most_common(MAX_REPORTED_BATCHES))


def _register_gauges(name: str, dispatcher: Dispatcher, metrics: Metrics) -> None:
    metrics.watch(
        name,
        lines_in_flight=lambda: dispatcher.in_flight,
        upstream_limit=lambda: dispatcher.limit,
        upstream_rate_limit=lambda: math.inf if dispatcher.rate_limit is None else dispatcher.rate_limit,
    )
    for reason in DISPATCH_REASONS:
        metrics.watch(name, reason, lines_waiting=partial(dispatcher.count_waiting, reason))
