"""The main program of a worker process of `batchline serve`: it runs lines on the same database and folder.

The pool starts it as `python -m batchline.app.workers.child`. It ends when the pool stops it or dies.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Mapping
from typing import BinaryIO

from batchline.app.backends import open_child_store, open_shared_objects
from batchline.app.roles import new_context, run
from batchline.app.startup import StartupError, stop_on_signals
from batchline.app.tracing import open_tracer
from batchline.app.upstreams import open_upstreams
from batchline.app.workers.autoscaler import CpuMeter
from batchline.app.workers.messages import (
    BatchLeftMessage,
    FromWorker,
    GoodbyeMessage,
    HeartbeatMessage,
    SharesMessage,
    StartMessage,
    StopMessage,
    encode_message,
    read_to_worker,
)
from batchline.domain.fleet import Report
from batchline.domain.held_bytes import HeldBytes
from batchline.engine import Context, clock_task, new_worker
from batchline.loops.heartbeat import Heartbeat
from batchline.loops.periodic import PeriodicTask
from batchline.settings import Settings
from batchline.system import SystemClock
from batchline.telemetry.aggregate import read_samples
from batchline.telemetry.logs import configure_logs
from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)


class PoolConnection:
    """The connection to the pool that started this process; caps are shared through it."""

    def __init__(self, reader: asyncio.StreamReader, writer: "_PipeWriter", *, metrics: Metrics) -> None:
        self._reader, self._writer, self._metrics = reader, writer, metrics
        self._meter = CpuMeter(SystemClock())
        self._shares: asyncio.Queue[dict[str, int]] = asyncio.Queue()

    @classmethod
    async def connect(cls, *, read_pipe: BinaryIO, write_pipe: BinaryIO, metrics: Metrics) -> "PoolConnection":
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), read_pipe)
        _, writer = await loop.connect_write_pipe(_PipeWriter, write_pipe)
        return cls(reader, writer, metrics=metrics)

    async def read_start(self) -> StartMessage:
        """Return the first message."""
        message = await read_to_worker(self._reader)
        if not isinstance(message, StartMessage):
            raise TypeError(message)
        return message

    async def listen(self, *, on_stop: Callable[[], None]) -> None:
        while True:
            try:
                message = await read_to_worker(self._reader)
            except asyncio.IncompleteReadError:
                # The serving process died. The next one on this folder reopens the shards that are leased here, so
                # that nothing of this process could be recorded any more.
                os._exit(1)
            if isinstance(message, SharesMessage):
                self._shares.put_nowait(message.shares)
            elif isinstance(message, StopMessage):
                on_stop()

    async def heartbeat(self, report: Report, *, caps: Mapping[str, int], lease: float) -> dict[str, int]:
        samples = read_samples(self._metrics.registry)
        self._writer.send(HeartbeatMessage(report=report, caps=caps, cpu_share=self._meter.read(), samples=samples))
        return await self._shares.get()

    async def leave(self, owner: str) -> None:
        self._writer.send(GoodbyeMessage(samples=read_samples(self._metrics.registry)))
        await self._writer.close()

    def send_batch_left(self) -> None:
        self._writer.send(BatchLeftMessage())


class _PipeWriter(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: asyncio.WriteTransport | None = None
        self._closed = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # connect_write_pipe passes a WriteTransport

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed.set()

    def send(self, message: FromWorker) -> None:
        if self._transport is not None:
            self._transport.write(encode_message(message))

    async def close(self) -> None:
        """Close the pipe once every message is written."""
        if self._transport is not None:
            self._transport.close()
            await self._closed.wait()


async def run_child(*, read_pipe: BinaryIO, write_pipe: BinaryIO) -> None:
    """Run lines until the pool sends a stop message, and then until what is in flight is recorded."""
    metrics = Metrics()
    connection = await PoolConnection.connect(read_pipe=read_pipe, write_pipe=write_pipe, metrics=metrics)
    start = await connection.read_start()
    settings = Settings(**start.settings)
    configure_logs(level=settings.log_level, form=settings.log_format)
    held_bytes = HeldBytes(settings.max_held_bytes)
    async with (
        open_upstreams(settings, lambda _name, _done, _total: None, held_bytes=held_bytes) as upstreams,
        open_child_store(settings) as (store, clock),
        open_shared_objects(settings) as objects,
    ):
        with open_tracer(settings, clock=clock, owner=start.owner) as tracer:
            context = new_context(
                settings,
                store=store,
                objects=objects,
                upstreams=upstreams,
                held_bytes=held_bytes,
                metrics=metrics,
                owner=start.owner,
                clock=clock,
                tracer=tracer,
            )
            await _run_lines(context, connection)


async def _run_lines(context: Context, connection: PoolConnection) -> None:
    worker = new_worker(context, on_batch_left=connection.send_batch_left)
    heartbeat = Heartbeat(fleet=connection, worker=worker, settings=context.settings)
    every = min(context.intervals.pool_heartbeat_seconds, context.settings.lease_seconds / 3)
    stop_on_signals(worker.stop)
    async with asyncio.TaskGroup() as group:
        listening = group.create_task(connection.listen(on_stop=worker.stop))
        task = PeriodicTask("heartbeat", heartbeat.step, every=every, clock=context.clock)
        background = [group.create_task(task.run()), group.create_task(clock_task(context).run())]
        await worker.run()
        for each in background:
            each.cancel()
        await heartbeat.leave()
        listening.cancel()


def main() -> None:
    write_pipe = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    # Nothing else that writes to stdout may come between the messages.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    configure_logs()
    try:
        run(run_child(read_pipe=sys.stdin.buffer, write_pipe=write_pipe))
    except asyncio.IncompleteReadError:
        sys.exit(1)
    except StartupError as error:
        log.error("worker process cannot start", extra={"reason": str(error)})  # noqa: TRY400 - the text says it all
        sys.exit(1)


if __name__ == "__main__":
    main()
