"""The parts of one process, wired together on whatever stands behind the ports.

The service and the simulation build the same engine; only the adapters differ.
"""

import asyncio
from collections.abc import Mapping

from batchline.domain.states import Stop
from batchline.loops.expire import Expire
from batchline.loops.finish import Finish
from batchline.loops.prune import Prune
from batchline.loops.pulse import Pulse
from batchline.loops.rescue import Rescue
from batchline.loops.uses import Uses
from batchline.loops.worker import Worker
from batchline.pipeline.cancel import Cancellation
from batchline.pipeline.download import Download
from batchline.pipeline.enqueue import Creation
from batchline.pipeline.finalize import Finalizer
from batchline.pipeline.fit import Fitting
from batchline.pipeline.progress import Inspection
from batchline.pipeline.traffic import Traffic
from batchline.pipeline.upload import Upload
from batchline.ports import Clock, Objects, Random, Store, Upstream, Validator
from batchline.settings import Settings
from batchline.telemetry.metrics import Metrics

_FINISH_SECONDS = 1.0
_EXPIRE_SECONDS = 1.0
_PRUNE_SECONDS = 10.0
_USES_SECONDS = 5.0
_SWEEP_SECONDS = 3600.0


class Engine:
    def __init__(
        self,
        *,
        settings: Settings,
        store: Store,
        objects: Objects,
        upstreams: Mapping[str, Upstream],
        fitting: Fitting,
        traffic: Traffic,
        validator: Validator,
        clock: Clock,
        random: Random,
        metrics: Metrics,
    ) -> None:
        owner = random.bytes(8).hex()
        self._worker = Worker(
            work=store,
            objects=objects,
            upstreams=upstreams,
            fitting=fitting,
            traffic=traffic,
            clock=clock,
            random=random,
            owner=owner,
            settings=settings,
            metrics=metrics,
            shard_done=self._shard_done,
        )
        self._finalizer = Finalizer(
            store=store,
            objects=objects,
            clock=clock,
            random=random,
            owner=owner,
            lease_seconds=settings.lease_seconds,
            retention_seconds=settings.file_retention_seconds,
        )
        self.uses = Uses(accounts=store, clock=clock)
        self._pulses = self._build_pulses(store, objects, clock, owner, settings, metrics)
        self.upload = Upload(
            files=store,
            objects=objects,
            clock=clock,
            random=random,
            owner=owner,
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
            owner=owner,
            lease_seconds=settings.lease_seconds,
            window_seconds=settings.completion_window_seconds,
            limits=settings.input_limits,
            started=self._worker.work_opened,
        )
        self.cancellation = Cancellation(batches=store, clock=clock, stopped=self._batch_stopped)
        self.inspection = Inspection(batches=store, running=self._worker, clock=clock)
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

    def _build_pulses(
        self, store: Store, objects: Objects, clock: Clock, owner: str, settings: Settings, metrics: Metrics
    ) -> list[Pulse]:
        prune = Prune(store=store, objects=objects, clock=clock, owner=owner)
        pruning = Pulse("prune", prune.step, every=_PRUNE_SECONDS, clock=clock)
        finish = Finish(finalizer=self._finalizer, metrics=metrics, finished=pruning.nudge)
        self._finishing = Pulse("finish", finish.step, every=_FINISH_SECONDS, clock=clock)
        rescue = Rescue(work=store, clock=clock, owner=owner, opened=self._worker.work_opened)
        expire = Expire(work=store, clock=clock, stopped=self._batch_stopped)
        return [
            Pulse("rescue", rescue.step, every=settings.lease_seconds / 3, clock=clock),
            Pulse("expire", expire.step, every=_EXPIRE_SECONDS, clock=clock),
            Pulse("uses", self.uses.step, every=_USES_SECONDS, clock=clock),
            Pulse("sweep", prune.sweep, every=_SWEEP_SECONDS, clock=clock),
            self._finishing,
            pruning,
        ]

    def _shard_done(self) -> None:
        self._finishing.nudge()

    def _batch_stopped(self, batch_id: str, stop: Stop) -> None:
        self._worker.batch_stopped(batch_id, stop)
        self._finishing.nudge()
