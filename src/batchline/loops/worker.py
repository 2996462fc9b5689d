"""The worker: claims shards while slots are free, keeps its leases, hears of stops, and goes down in order."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from batchline.domain.errors import ObjectsDown, StoreDown
from batchline.domain.retry import RetryPolicy
from batchline.domain.states import Stop
from batchline.pipeline.claim import Claims, HeldShard
from batchline.pipeline.dispatch import Dispatcher
from batchline.pipeline.gate import Gate
from batchline.pipeline.record import Recorder
from batchline.ports import Clock, Objects, Random, Upstream, Work
from batchline.settings import Settings
from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_SHORTEST_POLL, _LONGEST_POLL = 0.05, 2.0
_LISTEN_SECONDS = 1.0
_SHORTEST_FAREWELL = 5.0
_MOST_BYTES = 64 * 1024 * 1024
"""Lines held to be run: enough for any upstream, little for a machine."""


class Worker:
    """``shard_done`` hears of every shard that has nothing left to run: its batch may be over."""

    def __init__(
        self,
        *,
        work: Work,
        objects: Objects,
        upstream: Upstream,
        clock: Clock,
        random: Random,
        owner: str,
        settings: Settings,
        metrics: Metrics,
        shard_done: Callable[[], None],
    ) -> None:
        self._work, self._clock, self._random = work, clock, random
        self._shard_done = shard_done
        self._lease, self._grace = settings.lease_seconds, settings.shutdown_grace_seconds
        self._changed, self._opened, self._stopping = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._claims = Claims(work=work, objects=objects, clock=clock, owner=owner, lease_seconds=self._lease)
        self._recorder = Recorder(
            work=work,
            objects=objects,
            claims=self._claims,
            clock=clock,
            owner=owner,
            max_held_bytes=settings.max_held_bytes,
            metrics=metrics,
            recorded=self._recorded,
            shard_done=shard_done,
        )
        self._dispatcher = Dispatcher(
            upstream=upstream,
            recorder=self._recorder,
            gate=Gate(clock=clock, random=random, patience_seconds=settings.upstream_patience_seconds, metrics=metrics),
            policy=RetryPolicy(
                max_attempts=settings.max_attempts,
                max_throttles=settings.max_throttles,
                base_seconds=settings.retry_base_seconds,
            ),
            slots=settings.max_concurrency,
            clock=clock,
            random=random,
            metrics=metrics,
            changed=self._changed.set,
        )
        metrics.watch(
            lines_in_flight=lambda: self._dispatcher.in_flight,
            lines_waiting=lambda: self._dispatcher.waiting,
            shards_held=lambda: len(self._claims.shards),
            held_bytes=lambda: self._recorder.held_bytes,
        )

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            dispatching = group.create_task(self._dispatcher.run())
            recording = group.create_task(self._recorder.run())
            claiming = group.create_task(self._keep_claiming())
            listening = group.create_task(self._keep_listening())
            renewing = group.create_task(self._keep_renewing())
            await self._stopping.wait()
            await claiming
            await self._let_lines_finish()
            dispatching.cancel()
            await self._let_recorder_finish(recording)
            listening.cancel()
            renewing.cancel()
            await self._hand_back()

    def stop(self) -> None:
        """Claim and start nothing more; ``run`` ends when what is in flight is recorded."""
        self._stopping.set()
        self._opened.set()
        self._changed.set()
        self._dispatcher.drain()

    def work_opened(self) -> None:
        """There is something new to claim."""
        self._opened.set()
        self._changed.set()

    def batch_stopped(self, batch_id: str, stop: Stop) -> None:
        batch = self._claims.hear_stop(batch_id, stop)
        if batch is not None:
            self._dispatcher.stop_batch(batch, stop)
        self._changed.set()

    def _recorded(self) -> None:
        self._changed.set()
        self._dispatcher.pump()

    async def _keep_claiming(self) -> None:
        """While there is nothing to be had, ask less and less often, unless told that there is."""
        poll = _SHORTEST_POLL
        while not self._stopping.is_set():
            self._changed.clear()
            await self._release_stopped()
            if not self._dispatcher.wanted:
                await self._changed.wait()
            elif await self._claim():
                poll = _SHORTEST_POLL
            else:
                told = await self._wait_for_opening(poll * self._random.uniform(0.5, 1.0))
                poll = _SHORTEST_POLL if told else min(_LONGEST_POLL, poll * 2)

    async def _claim(self) -> bool:
        self._opened.clear()
        space = _MOST_BYTES - self._dispatcher.held_bytes
        if space <= 0:
            return False
        try:
            jobs = await self._claims.claim(lines=self._dispatcher.wanted, bytes=space)
        except (StoreDown, ObjectsDown) as error:
            log.warning("no work can be claimed", extra={"reason": str(error)})
            return False
        self._dispatcher.add(jobs)
        return bool(jobs)

    async def _wait_for_opening(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._opened.wait()
        except TimeoutError:
            return False
        return True

    async def _release_stopped(self) -> None:
        """Hand back the shards of stopped batches once nothing of them is in flight or unrecorded."""
        over = [
            shard
            for batch in list(self._claims.batches.values())
            if batch.stop is not None and batch.unanswered == 0 and not self._recorder.holds(batch)
            for shard in batch.shards.values()
        ]
        if over:
            await self._try_to_release(over)
            self._shard_done()

    async def _keep_listening(self) -> None:
        while True:
            await self._clock.sleep(_LISTEN_SECONDS)
            try:
                notices = await self._work.notices(list(self._claims.batches))
            except StoreDown as error:
                log.warning("stops cannot be heard of", extra={"reason": str(error)})
                continue
            for notice in notices:
                batch = self._claims.batches.get(notice.batch_id)
                if batch is not None and notice.stop is not None:
                    self._dispatcher.stop_batch(batch, notice.stop)
                elif batch is not None and notice.key_revoked and not batch.key_revoked:
                    self._dispatcher.revoke_key(batch)
            self._changed.set()

    async def _keep_renewing(self) -> None:
        while True:
            await self._clock.sleep(self._lease / 3)
            try:
                lost = await self._claims.renew()
            except StoreDown as error:
                log.warning("leases cannot be renewed", extra={"reason": str(error)})
                continue
            if lost:
                log.warning("leases were lost", extra={"shards": len(lost)})
            self._dispatcher.drop_lost()

    async def _let_lines_finish(self) -> None:
        until = self._clock.steady() + self._grace
        while self._dispatcher.in_flight and self._clock.steady() < until:
            await self._clock.sleep(_SHORTEST_POLL)

    async def _let_recorder_finish(self, recording: "asyncio.Task[None]") -> None:
        """What cannot be recorded, as the disk takes nothing, is run again by whoever takes the leases over."""
        self._recorder.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(self._grace, _SHORTEST_FAREWELL)):
                await recording

    async def _hand_back(self) -> None:
        await self._try_to_release(self._claims.shards)

    async def _try_to_release(self, shards: list[HeldShard]) -> None:
        try:
            await self._claims.release(shards)
        except StoreDown as error:
            log.warning("leases cannot be handed back; they will lapse", extra={"reason": str(error)})
