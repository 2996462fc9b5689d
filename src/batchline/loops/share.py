"""Among several processes: tell the others what this process does, and keep to its share of every cap."""

import asyncio

from batchline.domain.fleet import Report, Station
from batchline.loops.worker import Worker
from batchline.pipeline.traffic import Traffic
from batchline.ports import Sharing
from batchline.settings import Settings

_TRUSTED = 0.8
"""Of a lease: by then the next word should have been heard, and later nobody may start by the last one."""


class Share:
    """Of a worker. Where there is a cap, it starts nothing until it heard of its share, nor once the others may take it
    for dead."""

    def __init__(self, *, fleet: Sharing, worker: Worker, settings: Settings) -> None:
        self._fleet, self._worker = fleet, worker
        self._lease = settings.lease_seconds
        self._caps = {name: cap for name in worker.upstreams if (cap := settings.cap(name)) is not None}
        self._end: asyncio.TimerHandle | None = None
        self._allow_nothing()

    async def step(self) -> bool:
        loop = asyncio.get_running_loop()
        told_at = loop.time()
        shares = await self._fleet.tell(self._worker.report(), caps=self._caps, lease=self._lease)
        if self._end is not None:
            self._end.cancel()
        self._end = loop.call_at(told_at + _TRUSTED * self._lease, self._allow_nothing)
        for name, allowed in shares.items():
            self._worker.allow(name, allowed)
        return False

    def _allow_nothing(self) -> None:
        for name in self._caps:
            self._worker.allow(name, 0)

    async def leave(self) -> None:
        await self._fleet.leave(self._worker.report().owner)


class LiveCalls:
    """Of a process that only answers calls: those that somebody waits for leave less to batches."""

    def __init__(self, *, fleet: Sharing, traffic: Traffic, owner: str, settings: Settings) -> None:
        self._fleet, self._traffic, self._owner = fleet, traffic, owner
        self._names, self._lease = list(settings.sites), settings.lease_seconds
        self._told = False

    async def step(self) -> bool:
        live = {name: Station(live=self._traffic.live(name)) for name in self._names if self._traffic.live(name)}
        if live or self._told:
            await self._fleet.tell(Report(owner=self._owner, works=False, stations=live), caps={}, lease=self._lease)
        self._told = bool(live)
        return False
