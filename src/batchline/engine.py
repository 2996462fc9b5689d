"""The parts of one process, wired together on whatever stands behind the ports.

*Works* run batches, a *desk* takes them in and hands results out. A service has both, and so has the simulation; on
many machines a process has one of them. Only the adapters differ.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from batchline.domain.fleet import Report
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
from batchline.ports import Clock, Fleet, Objects, Random, Store, Upstream, Validator
from batchline.settings import Settings
from batchline.telemetry.metrics import Metrics

_FINISH_SECONDS = 1.0
_EXPIRE_SECONDS = 1.0
_PRUNE_SECONDS = 10.0
_USES_SECONDS = 5.0
_SWEEP_SECONDS = 3600.0
_SHARE_SECONDS = 2.0
_SHARE_WITH_HANDS_SECONDS = 0.5
_AMONG_OTHERS = 3.0
"""How much less often each looks for what is to be finished or has expired, where others look too. Who ends the last
line of a batch knows it at once."""


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What everything in a process stands on; ``owner`` is its name in leases."""

    settings: Settings
    store: Store
    objects: Objects
    upstreams: Mapping[str, Upstream]
    fitting: Fitting
    traffic: Traffic
    clock: Clock
    random: Random
    metrics: Metrics
    owner: str


class Hands(Fleet, Protocol):
    """Further processes that this one has to run lines, and caps that it shares with them."""

    def living(self) -> Sequence[str]:
        """Their owners, from before they could claim anything until they have ended; any thread may ask."""


class Works:
    """``shared`` says that others work on the same batches out of the same store, and keep caps through it."""

    def __init__(self, ground: Ground, *, shared: bool = False, hands: Hands | None = None) -> None:
        settings, store, clock, owner = ground.settings, ground.store, ground.clock, ground.owner
        self.worker = new_worker(ground, shard_done=self.shard_done)
        finalizer = Finalizer(
            store=store,
            objects=ground.objects,
            clock=clock,
            random=ground.random,
            owner=owner,
            lease_seconds=settings.lease_seconds,
            retention_seconds=settings.file_retention_seconds,
        )
        prune = Prune(store=store, objects=ground.objects, clock=clock, owner=owner)
        pruning = Pulse("prune", prune.step, every=_PRUNE_SECONDS, clock=clock)
        finish = Finish(finalizer=finalizer, metrics=ground.metrics, finished=pruning.nudge)
        patience = _AMONG_OTHERS if shared else 1.0
        self._finishing = Pulse("finish", finish.step, every=patience * _FINISH_SECONDS, clock=clock)
        rescue = Rescue(
            work=store,
            clock=clock,
            owner=owner,
            alive=lambda: [owner, *(hands.living() if hands is not None else ())],
            opened=self.worker.work_opened,
        )
        self._rescuing = Pulse("rescue", rescue.step, every=settings.lease_seconds / 3, clock=clock)
        expire = Expire(work=store, clock=clock, stopped=self.batch_stopped)
        self._pulses = [
            self._rescuing,
            Pulse("expire", expire.step, every=patience * _EXPIRE_SECONDS, clock=clock),
            Pulse("sweep", prune.sweep, every=_SWEEP_SECONDS, clock=clock),
            self._finishing,
            pruning,
        ]
        self._share: Share | None = None
        if shared:
            self._keep_sharing(store, ground, every=_SHARE_SECONDS)
        elif hands is not None:
            self._keep_sharing(hands, ground, every=_SHARE_WITH_HANDS_SECONDS)

    def _keep_sharing(self, fleet: Fleet, ground: Ground, *, every: float) -> None:
        self._share = Share(fleet=fleet, worker=self.worker, settings=ground.settings)
        beat = min(every, ground.settings.lease_seconds / 3)
        # First of all: where there is a cap, nothing starts before its share is known.
        self._pulses.insert(0, Pulse("share", self._share.step, every=beat, clock=ground.clock))

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

    def shard_done(self) -> None:
        """A batch may be over."""
        self._finishing.nudge()

    def hand_ended(self) -> None:
        """What it held when it died, or handed back, is there for others."""
        self._rescuing.nudge()
        self._finishing.nudge()
        self.worker.work_opened()

    def batch_stopped(self, batch_id: str, stop: Stop) -> None:
        self.worker.batch_stopped(batch_id, stop)
        self._finishing.nudge()


def new_worker(ground: Ground, *, shard_done: Callable[[], None]) -> Worker:
    return Worker(
        work=ground.store,
        objects=ground.objects,
        upstreams=ground.upstreams,
        fitting=ground.fitting,
        traffic=ground.traffic,
        clock=ground.clock,
        random=ground.random,
        owner=ground.owner,
        settings=ground.settings,
        metrics=ground.metrics,
        shard_done=shard_done,
    )


class Desk:
    """``opened`` and ``stopped`` hear of what the works of this process would otherwise find by themselves."""

    def __init__(
        self,
        ground: Ground,
        *,
        validator: Validator,
        workers: Workers,
        opened: Callable[[], None] = lambda: None,
        stopped: Callable[[str, Stop], None] = lambda _batch, _stop: None,
        calls: LiveCalls | None = None,
    ) -> None:
        settings, store, objects, clock = ground.settings, ground.store, ground.objects, ground.clock
        self.upload = Upload(
            files=store,
            objects=objects,
            clock=clock,
            random=ground.random,
            owner=ground.owner,
            lease_seconds=settings.lease_seconds,
            retention_seconds=settings.file_retention_seconds,
            max_bytes=settings.max_file_bytes,
        )
        self.creation = Creation(
            store=store,
            objects=objects,
            validator=validator,
            clock=clock,
            random=ground.random,
            owner=ground.owner,
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
        self, ground: Ground, *, validator: Validator, shared: bool = False, hands: Hands | None = None
    ) -> None:
        self.works = Works(ground, shared=shared, hands=hands)
        worker = self.works.worker
        self.desk = Desk(
            ground,
            validator=validator,
            workers=ground.store if shared else worker if hands is None else _WithHands(worker, hands),
            opened=worker.work_opened,
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


class _WithHands:
    """A worker as it is now, and its hands as they told last."""

    def __init__(self, worker: Worker, hands: Hands) -> None:
        self._worker, self._hands = worker, hands

    async def reports(self) -> list[Report]:
        own = self._worker.report()
        return [own, *(report for report in await self._hands.reports() if report.owner != own.owner)]
