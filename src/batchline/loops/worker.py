"""The worker: claims shards while slots are free, keeps its leases, hears of stops, and goes down in order."""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import groupby

from batchline.domain.errors import ObjectsDown, StoreDown
from batchline.domain.fleet import Report
from batchline.domain.models import DEFAULT_UPSTREAM, lanes_of
from batchline.domain.records import Lane
from batchline.domain.states import Stop
from batchline.pipeline.budget import Budgets
from batchline.pipeline.claim import Claims
from batchline.pipeline.dispatch.circuit_breaker import CircuitBreaker
from batchline.pipeline.dispatch.dispatcher import Dispatcher
from batchline.pipeline.dispatch.limiter import Limiter
from batchline.pipeline.job import HeldBatch, HeldShard, Job
from batchline.pipeline.record import Recorder
from batchline.pipeline.routing import SyncRouter
from batchline.pipeline.token_limit import TokenLimit
from batchline.ports import BatchSignal, Clock, Objects, Random, ShardStore, Upstream
from batchline.settings import Settings
from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_SHORTEST_POLL, _LONGEST_POLL = 0.05, 2.0
_LISTEN_SECONDS = 1.0
_SHORTEST_FAREWELL = 5.0
_MOST_BYTES = 64 * 1024 * 1024
"""Lines held to be run: enough for any upstream, little for a machine."""
_AT_A_TIME = 32
"""Lines handed out in one go: while more are looked into, answers would wait."""


class Worker:
    """``on_shard_done`` hears of every shard that has nothing left to run: its batch may be over."""

    def __init__(
        self,
        *,
        store: ShardStore,
        objects: Objects,
        upstreams: Mapping[str, Upstream],
        token_limit: TokenLimit,
        router: SyncRouter,
        clock: Clock,
        random: Random,
        owner: str,
        settings: Settings,
        metrics: Metrics,
        on_shard_done: Callable[[], None],
    ) -> None:
        self._store, self._clock, self._random = store, clock, random
        self._owner = owner
        self._on_shard_done = on_shard_done
        self._lease, self._grace = settings.lease_seconds, settings.shutdown_grace_seconds
        self._changed, self._opened, self._stopping = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._catalog = settings.catalog
        self._budgets = Budgets(metered=settings.metering)
        self._claims = Claims(
            store=store,
            objects=objects,
            budgets=self._budgets,
            clock=clock,
            owner=owner,
            lease_seconds=self._lease,
        )
        self._recorder = Recorder(
            store=store,
            objects=objects,
            claims=self._claims,
            clock=clock,
            owner=owner,
            max_held_bytes=settings.max_held_bytes,
            metrics=metrics,
            on_recorded=self._on_recorded,
            on_shard_done=on_shard_done,
        )
        self._dispatchers = {
            name: Dispatcher(
                name,
                upstream=upstream,
                catalog=self._catalog,
                token_limit=token_limit,
                tariff=settings.tariff,
                recorder=self._recorder,
                breaker=CircuitBreaker(
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
                count_sync_calls=partial(router.calls, name),
                on_line_dropped=self._changed.set,
                on_demand=self.on_work_available,
                find_alternative=partial(self._find_alternative, name),
            )
            for name, upstream in upstreams.items()
        }
        for name, dispatcher in self._dispatchers.items():
            router.watch(name, dispatcher.pump)
            _watch(name, dispatcher, metrics)
        metrics.watch(
            lines_waiting=lambda: sum(dispatcher.waiting for dispatcher in self._dispatchers.values()),
            shards_held=lambda: len(self._claims.shards),
            held_bytes=lambda: self._recorder.held_bytes,
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            dispatching = [group.create_task(dispatcher.run()) for dispatcher in self._dispatchers.values()]
            recording = group.create_task(self._recorder.run())
            claiming = group.create_task(self._claim_loop())
            listening = group.create_task(self._poll_signals())
            renewing = group.create_task(self._renew_loop())
            await self._stopping.wait()
            await claiming
            await self._let_lines_finish()
            for task in dispatching:
                task.cancel()
            await self._let_recorder_finish(recording)
            listening.cancel()
            renewing.cancel()
            await self._release_all()

    def stop(self) -> None:
        """Claim and start nothing more; ``run`` ends when what is in flight is recorded."""
        self._stopping.set()
        self._opened.set()
        self._changed.set()
        for dispatcher in self._dispatchers.values():
            dispatcher.drain()

    def on_work_available(self) -> None:
        """There is something new to claim."""
        self._opened.set()
        self._changed.set()

    def on_batch_stopped(self, batch_id: str, stop: Stop) -> None:
        batch = self._claims.note_stop(batch_id, stop)
        if batch is not None:
            self._stop_batch(batch, stop)
        self._changed.set()

    @property
    def upstreams(self) -> list[str]:
        return list(self._dispatchers)

    async def reports(self) -> list[Report]:
        """What this process is doing."""
        return [self.report()]

    def report(self) -> Report:
        return Report(
            owner=self._owner,
            runs_batches=True,
            upstream_loads={name: dispatcher.upstream_load for name, dispatcher in self._dispatchers.items()},
            batches=sum((dispatcher.in_flight_by_batch for dispatcher in self._dispatchers.values()), Counter()),
        )

    def set_cap(self, upstream: str, cap: int) -> None:
        """From now on no more lines than this may be in flight to an upstream."""
        self._dispatchers[upstream].set_cap(cap)

    @property
    def _in_flight(self) -> int:
        return sum(dispatcher.in_flight for dispatcher in self._dispatchers.values())

    def _stop_batch(self, batch: HeldBatch, stop: Stop) -> None:
        for dispatcher in self._dispatchers.values():
            dispatcher.stop_batch(batch, stop)

    def _on_recorded(self) -> None:
        self._changed.set()
        for dispatcher in self._dispatchers.values():
            dispatcher.pump()

    async def _claim_loop(self) -> None:
        """While there is nothing to be had, ask less and less often, unless told that there is."""
        poll, next_poll = _SHORTEST_POLL, 0.0
        while not self._stopping.is_set():
            self._changed.clear()
            await self._release_stopped()
            told = self._opened.is_set()
            if told or self._clock.steady() >= next_poll:
                if await self._claim():
                    poll, next_poll = _SHORTEST_POLL, 0.0
                    continue
                poll = _SHORTEST_POLL if told else min(_LONGEST_POLL, poll * 2)
                next_poll = self._clock.steady() + poll * self._random.uniform(0.5, 1.0)
            await self._wait_for_change(next_poll - self._clock.steady())

    async def _claim(self) -> bool:
        self._opened.clear()
        wanted = max(dispatcher.wanted_lines for dispatcher in self._dispatchers.values())
        space = _MOST_BYTES - sum(dispatcher.held_bytes for dispatcher in self._dispatchers.values())
        if wanted <= 0 or space <= 0:
            return False
        try:
            jobs = await self._claims.claim(lines=wanted, bytes=space, without=self._not_wanted())
        except (StoreDown, ObjectsDown) as error:
            log.warning("no work can be claimed", extra={"reason": str(error)})
            return False
        for start in range(0, len(jobs), _AT_A_TIME):
            self._distribute(jobs[start : start + _AT_A_TIME])
            await self._clock.sleep(0)
        return bool(jobs)

    def _not_wanted(self) -> list[Lane]:
        """What would only lie here, while others could run it or this process could run others'."""
        lanes: list[Lane] = []
        for model in self._catalog.served():
            names = (DEFAULT_UPSTREAM,) if model is None else model.upstreams
            serving = [self._dispatchers[name] for name in names]
            there = [dispatcher for dispatcher in serving if not dispatcher.paused] or serving
            demanding = [dispatcher for dispatcher in there if dispatcher.wanted_lines]
            if not demanding:
                lanes += lanes_of(model)
            else:
                satisfied = set.intersection(*(dispatcher.satisfied_projects for dispatcher in demanding))
                named = None if model is None else model.id
                lanes += [Lane(model=named, project_id=project_id) for project_id in satisfied]
        return lanes

    def _distribute(self, jobs: list[Job]) -> None:
        """Each line to the upstream of its model that is the least busy; one of a model that nobody serves to any,
        which refuses it."""
        for shard, group in groupby(jobs, key=lambda job: job.shard):
            names = [name for name in self._catalog.upstreams_of(shard.model) if name in self._dispatchers]
            serving = [self._dispatchers[name] for name in names or self._dispatchers]
            there = [dispatcher for dispatcher in serving if not dispatcher.paused] or serving
            if len(there) == 1:
                there[0].add(group)
                continue
            for job in group:
                min(there, key=lambda dispatcher: dispatcher.load).add([job])

    def _find_alternative(self, name: str, job: Job) -> Dispatcher | None:
        """Another upstream for a line, that is there."""
        others = [self._dispatchers[other] for other in job.model.upstreams if other != name]
        return min(
            (dispatcher for dispatcher in others if not dispatcher.paused),
            key=lambda dispatcher: dispatcher.load,
            default=None,
        )

    def _lend_probe_jobs(self) -> None:
        """An upstream that is gone gets a line to be probed with from another that runs its models meanwhile."""
        for name, dispatcher in self._dispatchers.items():
            if dispatcher.needs_probe_job:
                others = (other.lend_job(name) for other in self._dispatchers.values() if other is not dispatcher)
                job = next((job for job in others if job is not None), None)
                if job is not None:
                    dispatcher.accept(job)

    async def _wait_for_change(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._changed.wait()

    async def _release_stopped(self) -> None:
        """Hand back the shards of stopped batches once nothing of them is in flight or unrecorded."""
        over = [
            shard
            for batch in list(self._claims.batches.values())
            if batch.stop is not None and batch.pending_lines == 0 and not self._recorder.holds(batch)
            for shard in batch.shards.values()
        ]
        if over:
            await self._try_to_release(over)
            self._on_shard_done()

    async def _poll_signals(self) -> None:
        while True:
            await self._clock.sleep(_LISTEN_SECONDS)
            moment = self._budgets.moment
            try:
                notices = await self._store.signals(list(self._claims.batches))
            except StoreDown as error:
                log.warning("stops cannot be heard of", extra={"reason": str(error)})
                continue
            for signal in notices:
                self._apply_signal(signal, read_at=moment)
            self._lend_probe_jobs()
            self._changed.set()

    def _apply_signal(self, signal: BatchSignal, *, read_at: int) -> None:
        batch = self._claims.batches.get(signal.batch_id)
        if batch is None:
            return
        batch.budget.tell(signal.funds, read_at=read_at)
        if signal.stop is not None:
            self._stop_batch(batch, signal.stop)
        elif signal.key_revoked and not batch.key_revoked:
            for dispatcher in self._dispatchers.values():
                dispatcher.revoke_key(batch)

    async def _renew_loop(self) -> None:
        while True:
            await self._clock.sleep(self._lease / 3)
            try:
                lost = await self._claims.renew()
            except StoreDown as error:
                log.warning("leases cannot be renewed", extra={"reason": str(error)})
                continue
            if lost:
                log.warning("leases were lost", extra={"shards": len(lost)})
            for dispatcher in self._dispatchers.values():
                dispatcher.drop_lost()

    async def _let_lines_finish(self) -> None:
        until = self._clock.steady() + self._grace
        while self._in_flight and self._clock.steady() < until:
            await self._clock.sleep(_SHORTEST_POLL)

    async def _let_recorder_finish(self, recording: "asyncio.Task[None]") -> None:
        """What cannot be recorded, as the disk takes nothing, is run again by whoever takes the leases over."""
        self._recorder.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(self._grace, _SHORTEST_FAREWELL)):
                await recording

    async def _release_all(self) -> None:
        await self._try_to_release(self._claims.shards)

    async def _try_to_release(self, shards: list[HeldShard]) -> None:
        try:
            await self._claims.release(shards)
        except StoreDown as error:
            log.warning("leases cannot be handed back; they will lapse", extra={"reason": str(error)})


def _watch(name: str, dispatcher: Dispatcher, metrics: Metrics) -> None:
    metrics.watch(
        name,
        lines_in_flight=lambda: dispatcher.in_flight,
        upstream_limit=lambda: dispatcher.limit,
        upstream_rate_limit=lambda: math.inf if dispatcher.rate_limit is None else dispatcher.rate_limit,
    )
