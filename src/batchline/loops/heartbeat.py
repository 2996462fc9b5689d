"""Reports the load of this process to the other processes of its fleet, and applies its share of every cap."""

import asyncio
import logging

from batchline.domain.errors import StoreDown
from batchline.domain.fleet import Report, UpstreamLoad
from batchline.loops.worker import Worker
from batchline.pipeline.routing import SyncRouter
from batchline.ports import CapSharing
from batchline.settings import Settings

log = logging.getLogger(__name__)

_SHARE_LIFETIME_PART_OF_LEASE = 0.8
"""The part of the lease after which a granted share is void unless it was renewed. It ends before the lease does, so
that no line starts on a share that the others may have taken over."""


class Heartbeat:
    """The heartbeat of a worker.

    An upstream with a cap gets no line before the first share is granted, nor after the last one became void.
    """

    def __init__(self, *, fleet: CapSharing, worker: Worker, settings: Settings) -> None:
        self._fleet, self._worker = fleet, worker
        self._lease_seconds = settings.lease_seconds
        self._caps = {name: cap for name in worker.upstreams if (cap := settings.cap(name)) is not None}
        self._expiry_timer: asyncio.TimerHandle | None = None
        self._revoke_shares()

    async def step(self) -> bool:
        """Report the load of this process, and apply the shares that are granted in return."""
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        shares = await self._fleet.heartbeat(self._worker.report(), caps=self._caps, lease=self._lease_seconds)
        if self._expiry_timer is not None:
            self._expiry_timer.cancel()
        self._expiry_timer = loop.call_at(
            sent_at + _SHARE_LIFETIME_PART_OF_LEASE * self._lease_seconds, self._revoke_shares
        )
        for name, share in shares.items():
            self._worker.set_cap(name, share)
        return False

    def _revoke_shares(self) -> None:
        for name in self._caps:
            self._worker.set_cap(name, 0)

    async def leave(self) -> None:
        """Report that this process ends, so that others get its shares at once. If that fails, the shares expire."""
        try:
            await self._fleet.leave(self._worker.report().owner)
        except StoreDown as error:
            log.warning("failed to give up shares, leaving them to expire", extra={"reason": str(error)})


class SyncCallHeartbeat:
    """The heartbeat of a process that only serves the API: its synchronous calls leave fewer slots to batches."""

    def __init__(self, *, fleet: CapSharing, router: SyncRouter, owner: str, settings: Settings) -> None:
        self._fleet, self._router, self._owner = fleet, router, owner
        self._names, self._lease_seconds = list(settings.all_upstreams), settings.lease_seconds
        self._has_reported = False

    async def step(self) -> bool:
        """Report the synchronous calls in progress, and once more after the last one has ended."""
        calls = {name: self._router.calls(name).total for name in self._names}
        loads = {name: UpstreamLoad(sync_calls=count) for name, count in calls.items() if count}
        if loads or self._has_reported:
            report = Report(owner=self._owner, runs_batches=False, upstream_loads=loads)
            await self._fleet.heartbeat(report, caps={}, lease=self._lease_seconds)
        self._has_reported = bool(loads)
        return False
