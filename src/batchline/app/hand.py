"""A hand of `batchline serve`: a process that runs lines over the same database and folder, and does nothing else.

It is started as `python -m batchline.app.hand` by the crew, and ends when that says so, or with it.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import BinaryIO

from batchline.app.backends import hold_objects, open_store
from batchline.app.messages import Allowed, Beat, Begin, Farewell, FromHand, ShardDone, Stop, packed, read_to_hand
from batchline.app.roles import run
from batchline.app.sites import fitting_of, open_sites
from batchline.app.staffing import Meter
from batchline.app.startup import StartupError, stop_on_signals
from batchline.domain.fleet import Report
from batchline.engine import Ground, new_worker
from batchline.loops.pulse import Pulse
from batchline.loops.share import Share
from batchline.pipeline.traffic import Traffic
from batchline.settings import Settings
from batchline.system import SystemClock, SystemRandom
from batchline.telemetry.elsewhere import counted
from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_BEAT_SECONDS = 0.5


class Parent:
    """The serving process, at the other end of the pipes; caps are shared through it."""

    def __init__(self, reader: asyncio.StreamReader, mouth: "_Mouth", *, metrics: Metrics) -> None:
        self._reader, self._mouth, self._metrics = reader, mouth, metrics
        self._meter = Meter(SystemClock())
        self._allowed: asyncio.Queue[dict[str, int]] = asyncio.Queue()

    @classmethod
    async def meet(cls, *, hears: BinaryIO, speaks: BinaryIO, metrics: Metrics) -> "Parent":
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), hears)
        _, mouth = await loop.connect_write_pipe(_Mouth, speaks)
        return cls(reader, mouth, metrics=metrics)

    async def order(self) -> Begin:
        """The first word."""
        begin = await read_to_hand(self._reader)
        if not isinstance(begin, Begin):
            raise TypeError(begin)
        return begin

    async def listen(self, *, stop: Callable[[], None]) -> None:
        while True:
            try:
                message = await read_to_hand(self._reader)
            except asyncio.IncompleteReadError:
                # It died. Somebody else may serve the folder soon, and nothing here would count any more.
                os._exit(1)
            if isinstance(message, Allowed):
                self._allowed.put_nowait(message.shares)
            elif isinstance(message, Stop):
                stop()

    async def tell(self, report: Report, *, caps: Mapping[str, int], lease: float) -> dict[str, int]:
        numbers = counted(self._metrics.registry)
        self._mouth.say(Beat(report=report, caps=caps, busy=self._meter.read(), numbers=numbers))
        return await self._allowed.get()

    async def leave(self, owner: str) -> None:
        self._mouth.say(Farewell(numbers=counted(self._metrics.registry)))
        await self._mouth.close()

    def shard_done(self) -> None:
        self._mouth.say(ShardDone())


class _Mouth(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # that of a pipe to write to

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()

    def say(self, message: FromHand) -> None:
        if self._transport is not None:
            self._transport.write(packed(message))

    async def close(self) -> None:
        """Once everything was said."""
        if self._transport is not None:
            self._transport.close()
            await self._closed.wait()


async def work(*, hears: BinaryIO, speaks: BinaryIO) -> None:
    """Run lines until the parent says stop, and then until what is in flight is recorded."""
    metrics, clock = Metrics(), SystemClock()
    parent = await Parent.meet(hears=hears, speaks=speaks, metrics=metrics)
    begin = await parent.order()
    settings = Settings(**begin.settings)
    sites = await open_sites(settings, lambda _done, _total: None)
    async with open_store(settings) as store, hold_objects(settings) as objects:
        ground = Ground(
            settings=settings,
            store=store,
            objects=objects,
            upstreams=sites,
            fitting=fitting_of(sites),
            traffic=Traffic(clock=clock),
            clock=clock,
            random=SystemRandom(),
            metrics=metrics,
            owner=begin.owner,
        )
        await _run_lines(ground, parent)
    for site in sites.values():
        await site.close()


async def _run_lines(ground: Ground, parent: Parent) -> None:
    worker = new_worker(ground, shard_done=parent.shard_done)
    share = Share(fleet=parent, worker=worker, settings=ground.settings)
    beat = min(_BEAT_SECONDS, ground.settings.lease_seconds / 3)
    stop_on_signals(worker.stop)
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(parent.listen(stop=worker.stop))
        sharing = group.create_task(Pulse("share", share.step, every=beat, clock=ground.clock).run())
        await worker.run()
        sharing.cancel()
        await share.leave()
        listening.cancel()


def main() -> None:
    speaks = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    # Whatever else writes to stdout must not come between the messages.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        run(work(hears=sys.stdin.buffer, speaks=speaks))
    except asyncio.IncompleteReadError:
        sys.exit(1)
    except StartupError as refused:
        log.error("this process cannot run lines", extra={"reason": str(refused)})  # noqa: TRY400 - said in full
        sys.exit(1)


if __name__ == "__main__":
    main()
