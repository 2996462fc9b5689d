"""The parts of one process, wired together on whatever stands behind the ports.

The service and the simulation build the same engine; only the adapters differ.
"""

import asyncio

from batchline.domain.retry import RetryPolicy
from batchline.domain.states import Stop
from batchline.loops.expire import Expire
from batchline.loops.finish import Finish
from batchline.loops.prune import Prune
from batchline.loops.pulse import Pulse
from batchline.loops.rescue import Rescue
from batchline.loops.worker import Worker
from batchline.pipeline.cancel import Cancellation
from batchline.pipeline.claim import Claims
from batchline.pipeline.dispatch import Dispatcher
from batchline.pipeline.download import Download
from batchline.pipeline.enqueue import Creation
from batchline.pipeline.finalize import Finalizer
from batchline.pipeline.gate import Gate
from batchline.pipeline.record import Recorder
from batchline.pipeline.upload import Upload
from batchline.ports import Clock, Objects, Random, Store, Upstream, Validator
from batchline.settings import Settings
from batchline.telemetry.metrics import Metrics

_SWEEP_SECONDS = 3600.0


class Engine:
    def __init__(
        self,
        *,
        settings: Settings,
        store: Store,
        objects: Objects,
        upstream: Upstream,
        validator: Validator,
        clock: Clock,
        random: Random,
        metrics: Metrics,
    ) -> None:
        self._settings, self._store, self._objects = settings, store, objects
        self._clock, self._random, self._metrics = clock, random, metrics
        self._owner = random.bytes(8).hex()
        self._changed = asyncio.Event()
        self._worker = self._build_worker(upstream)
        self._finishing, self._pulses = self._build_pulses()
        self.upload = Upload(
            files=store,
            objects=objects,
            clock=clock,
            random=random,
            owner=self._owner,
            lease_seconds=settings.lease_seconds,
            retention_seconds=settings.file_retention_seconds,
            max_bytes=settings.max_file_bytes,
        )
        self.creation = Creation(
            store=store,
            objects=objects,
            validator=validator,
            clock=clock,
            random=random,
            owner=self._owner,
            lease_seconds=settings.lease_seconds,
            window_seconds=settings.completion_window_seconds,
            limits=settings.input_limits,
            started=self._worker.work_opened,
        )
        self.cancellation = Cancellation(batches=store, clock=clock, stopped=self._batch_stopped)
        self.download = Download(files=store, objects=objects, clock=clock)

    async def run(self) -> None:
        """Until ``stop``, and then until what is in flight is recorded."""
        async with asyncio.TaskGroup() as group:
            pulses = [group.create_task(pulse.run()) for pulse in self._pulses]
            await self._worker.run()
            for pulse in pulses:
                pulse.cancel()

    def stop(self) -> None:
        self._worker.stop()

    def _batch_stopped(self, batch_id: str, stop: Stop) -> None:
        self._worker.batch_stopped(batch_id, stop)
        self._finishing.nudge()

    def _build_worker(self, upstream: Upstream) -> Worker:
        settings, clock, random = self._settings, self._clock, self._random
        claims = Claims(
            work=self._store,
            objects=self._objects,
            clock=clock,
            owner=self._owner,
            lease_seconds=settings.lease_seconds,
        )
        gate = Gate(
            clock=clock,
            random=random,
            patience_seconds=settings.upstream_patience_seconds,
            metrics=self._metrics,
        )
        recorder = Recorder(
            work=self._store,
            objects=self._objects,
            claims=claims,
            clock=clock,
            owner=self._owner,
            max_held_bytes=settings.max_held_bytes,
            metrics=self._metrics,
            recorded=self._recorded,
            shard_done=self._shard_done,
        )
        self._dispatcher = Dispatcher(
            upstream=upstream,
            recorder=recorder,
            gate=gate,
            policy=RetryPolicy(
                max_attempts=settings.max_attempts,
                max_throttles=settings.max_throttles,
                base_seconds=settings.retry_base_seconds,
            ),
            slots=settings.max_concurrency,
            clock=clock,
            random=random,
            metrics=self._metrics,
            changed=self._changed.set,
        )
        self._metrics.watch(
            lines_in_flight=lambda: self._dispatcher.in_flight,
            lines_waiting=lambda: self._dispatcher.waiting,
            shards_held=lambda: len(claims.shards),
            held_bytes=lambda: recorder.held_bytes,
        )
        return Worker(
            work=self._store,
            claims=claims,
            dispatcher=self._dispatcher,
            recorder=recorder,
            clock=clock,
            random=random,
            lease_seconds=settings.lease_seconds,
            grace_seconds=settings.shutdown_grace_seconds,
            changed=self._changed,
        )

    def _recorded(self) -> None:
        self._changed.set()
        self._dispatcher.pump()

    def _shard_done(self) -> None:
        self._finishing.nudge()

    def _build_pulses(self) -> tuple[Pulse, list[Pulse]]:
        settings, clock = self._settings, self._clock
        prune = Prune(store=self._store, objects=self._objects, clock=clock, owner=self._owner)
        pruning = Pulse("prune", prune.step, every=10, clock=clock)
        finalizer = Finalizer(
            store=self._store,
            objects=self._objects,
            clock=clock,
            random=self._random,
            owner=self._owner,
            lease_seconds=settings.lease_seconds,
            retention_seconds=settings.file_retention_seconds,
        )
        finish = Finish(finalizer=finalizer, metrics=self._metrics, finished=pruning.nudge)
        finishing = Pulse("finish", finish.step, every=1, clock=clock)
        rescue = Rescue(work=self._store, clock=clock, owner=self._owner, opened=self._worker.work_opened)
        expire = Expire(work=self._store, clock=clock, stopped=self._batch_stopped)
        return finishing, [
            finishing,
            pruning,
            Pulse("rescue", rescue.step, every=settings.lease_seconds / 3, clock=clock),
            Pulse("expire", expire.step, every=1, clock=clock),
            Pulse("sweep", prune.sweep, every=_SWEEP_SECONDS, clock=clock),
        ]
