"""The parts of one process, wired together on whatever stands behind the ports.

*Works* run batches, a *desk* takes them in and hands results out. A service has both, and so has the simulation; on
many machines a process has one of them. Only the adapters differ.
"""

import asyncio
from collections.abc import Callable, Mapping

from batchline.domain.states import Stop
from batchline.loops.expire import Expire
from batchline.loops.finish import Finish
from batchline.loops.prune import Prune
from batchline.loops.pulse import Pulse
from batchline.loops.rescue import Rescue
from batchline.loops.share import LiveCalls, Share
from batchline.loops.uses import Uses
from batchline.loops.worker import Worker
from batchline.pipeline.cancel import Cancellation
from batchline.pipeline.download import Download
from batchline.pipeline.enqueue import Creation
from batchline.pipeline.finalize import Finalizer
from batchline.pipeline.fit import Fitting
from batchline.pipeline.progress import Inspection, Workers
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
_SHARE_SECONDS = 2.0
_AMONG_OTHERS = 3.0
"""How much less often each looks for what is to be finished or has expired, where others look too. Who ends the last
line of a batch knows it at once."""


class Works:
    """``fleet`` says that others work on the same batches, and that caps are shared with them."""

    def __init__(
        self,
        *,
        settings: Settings,
        store: Store,
        objects: Objects,
        upstreams: Mapping[str, Upstream],
        fitting: Fitting,
        traffic: Traffic,
        clock: Clock,
        random: Random,
        metrics: Metrics,
        owner: str,
        fleet: bool = False,
    ) -> None:
        self.worker = Worker(
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
        finalizer = Finalizer(
            store=store,
            objects=objects,
            clock=clock,
            random=random,
            owner=owner,
            lease_seconds=settings.lease_seconds,
            retention_seconds=settings.file_retention_seconds,
        )
        prune = Prune(store=store, objects=objects, clock=clock, owner=owner)
        pruning = Pulse("prune", prune.step, every=_PRUNE_SECONDS, clock=clock)
        finish = Finish(finalizer=finalizer, metrics=metrics, finished=pruning.nudge)
        patience = _AMONG_OTHERS if fleet else 1.0
        self._finishing = Pulse("finish", finish.step, every=patience * _FINISH_SECONDS, clock=clock)
        rescue = Rescue(work=store, clock=clock, owner=owner, opened=self.worker.work_opened)
        expire = Expire(work=store, clock=clock, stopped=self.batch_stopped)
        self._pulses = [
            Pulse("rescue", rescue.step, every=settings.lease_seconds / 3, clock=clock),
            Pulse("expire", expire.step, every=patience * _EXPIRE_SECONDS, clock=clock),
            Pulse("sweep", prune.sweep, every=_SWEEP_SECONDS, clock=clock),
            self._finishing,
            pruning,
        ]
        self._share = Share(fleet=store, worker=self.worker, settings=settings) if fleet else None
        if self._share is not None:
            beat = min(_SHARE_SECONDS, settings.lease_seconds / 3)
            self._pulses.append(Pulse("share", self._share.step, every=beat, clock=clock))

    async def run(self) -> None:
        """Until ``stop``, and then until what is in flight is recorded."""
        async with asyncio.TaskGroup() as group:
            pulses = [group.create_task(pulse.run()) for pulse in self._pulses]
            await self.worker.run()
            for pulse in pulses:
                pulse.cancel()
        if self._share is not None:
            await self._share.leave()

    def stop(self) -> None:
        self.worker.stop()

    def _shard_done(self) -> None:
        self._finishing.nudge()

    def batch_stopped(self, batch_id: str, stop: Stop) -> None:
        self.worker.batch_stopped(batch_id, stop)
        self._finishing.nudge()


class Desk:
    """``opened`` and ``stopped`` hear of what the works of this process would otherwise find by themselves."""

    def __init__(
        self,
        *,
        settings: Settings,
        store: Store,
        objects: Objects,
        validator: Validator,
        workers: Workers,
        clock: Clock,
        random: Random,
        owner: str,
        opened: Callable[[], None] = lambda: None,
        stopped: Callable[[str, Stop], None] = lambda _batch, _stop: None,
        calls: LiveCalls | None = None,
    ) -> None:
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
            started=opened,
        )
        self.cancellation = Cancellation(batches=store, clock=clock, stopped=stopped)
        self.inspection = Inspection(batches=store, workers=workers, catalog=settings.catalog, clock=clock)
        self.download = Download(files=store, objects=objects, clock=clock)
        self.uses = Uses(accounts=store, clock=clock)
        self._pulses = [Pulse("uses", self.uses.step, every=_USES_SECONDS, clock=clock)]
        if calls is not None:
            self._pulses.append(Pulse("calls", calls.step, every=_SHARE_SECONDS, clock=clock))

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for pulse in self._pulses:
                group.create_task(pulse.run())


class Engine:
    """Works and a desk in one process."""

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
        fleet: bool = False,
    ) -> None:
        owner = random.bytes(8).hex()
        self.works = Works(
            settings=settings,
            store=store,
            objects=objects,
            upstreams=upstreams,
            fitting=fitting,
            traffic=traffic,
            clock=clock,
            random=random,
            metrics=metrics,
            owner=owner,
            fleet=fleet,
        )
        self.desk = Desk(
            settings=settings,
            store=store,
            objects=objects,
            validator=validator,
            workers=store if fleet else self.works.worker,
            clock=clock,
            random=random,
            owner=owner,
            opened=self.works.worker.work_opened,
            stopped=self.works.batch_stopped,
        )

    async def run(self) -> None:
        """Until ``stop``, and then until what is in flight is recorded."""
        async with asyncio.TaskGroup() as group:
            desk = group.create_task(self.desk.run())
            await self.works.run()
            desk.cancel()

    def stop(self) -> None:
        self.works.stop()
