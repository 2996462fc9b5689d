"""The pool of worker processes of `batchline serve`, which run lines beside it while one core is not enough."""

import asyncio
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from contextlib import suppress
from typing import cast

from msgspec import DecodeError

from batchline.app.workers.autoscaler import Autoscaler, CpuMeter
from batchline.app.workers.messages import (
    BatchLeftMessage,
    FromWorker,
    HeartbeatMessage,
    SharesMessage,
    StartMessage,
    StopMessage,
    ToWorker,
    dump_settings,
    encode_message,
    read_from_worker,
)
from batchline.domain.fleet import Member, Report, shares_of
from batchline.engine import Context, WorkerRole
from batchline.settings import Settings

log = logging.getLogger(__name__)

_EXIT_SECONDS = 5.0
"""The time that a child which closed its pipe may take to end before it is killed."""


def max_worker_processes(settings: Settings) -> int:
    """Return the number of processes that may run lines here.

    It is one on PostgreSQL, where an operator starts workers, and one if a model on this machine answers, since that
    model needs the cores itself.
    """
    if settings.database_url is not None or settings.embeds_model or settings.classifies:
        return 1
    return settings.worker_processes or os.cpu_count() or 1


class MemoryFleet:
    """A Fleet in the memory of the process that started the others.

    No member expires: the pool knows when a child has ended, and until then the child may have in flight what it was
    granted.
    """

    def __init__(self) -> None:
        self._members: dict[str, Member] = {}

    def join(self, owner: str) -> None:
        """Add a member, so that the others make room for its share of every cap."""
        self._members[owner] = Member(report=Report(owner=owner, runs_batches=True))

    def live_owners(self) -> list[str]:
        return list(self._members)

    async def heartbeat(self, report: Report, *, caps: Mapping[str, int], lease: float) -> dict[str, int]:
        others = [member for owner, member in self._members.items() if owner != report.owner]
        shares = shares_of(report, caps=caps, others=others)
        reserved = {name: share.reserved for name, share in shares.items()}
        self._members[report.owner] = Member(report=report, reserved=reserved)
        return {name: share.allowed for name, share in shares.items()}

    async def leave(self, owner: str) -> None:
        self._members.pop(owner, None)

    async def reports(self) -> list[Report]:
        return [member.report for member in self._members.values()]


class WorkerPool:
    """Starts and stops worker processes as the autoscaler decides, and answers their messages."""

    def __init__(
        self,
        context: Context,
        *,
        worker_role: WorkerRole,
        fleet: MemoryFleet,
        autoscaler: Autoscaler,
        check_seconds: float = 1.0,
    ) -> None:
        self._context, self._worker_role = context, worker_role
        self._fleet, self._autoscaler, self._check_seconds = fleet, autoscaler, check_seconds
        self._meter = CpuMeter(context.clock)
        self._children: list[_WorkerProcess] = []
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Run until ``stop``, and then until every child has ended."""
        async with asyncio.TaskGroup() as group:
            while not await self._stopped_within(self._check_seconds):
                await self._scale(group)
            for child in self._children:
                self._stop_child(child)

    def stop(self) -> None:
        self._stopping.set()

    async def _stopped_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        return self._stopping.is_set()

    async def _scale(self, group: asyncio.TaskGroup) -> None:
        cpu_shares = [self._meter.read(), *(child.cpu_share for child in self._children)]
        if any(child.is_stopping for child in self._children):
            return
        loads = self._worker_role.worker.report().upstream_loads.values()
        runs_lines = any(load.in_flight for load in loads)
        change = self._autoscaler.check(cpu_shares, runs_lines=runs_lines, at=self._context.clock.steady())
        if change > 0:
            await self._start_child(group)
        elif change < 0:
            self._stop_child(self._children[-1])

    async def _start_child(self, group: asyncio.TaskGroup) -> None:
        owner = self._context.random.bytes(8).hex()
        # It joins before it can claim anything, so that its leases are never taken for those of a dead process.
        self._fleet.join(owner)
        try:
            child = _WorkerProcess(owner, await _spawn())
        except OSError as error:
            log.warning("failed to start a worker process", extra={"reason": str(error)})
            await self._fleet.leave(owner)
            return
        child.send(StartMessage(owner=owner, settings=dump_settings(self._context.settings)))
        self._children.append(child)
        group.create_task(self._serve_child(child))
        log.info("worker process started", extra={"pid": child.pid, "processes": 1 + len(self._children)})

    def _stop_child(self, child: "_WorkerProcess") -> None:
        """Ask a child to end, within the time this process itself would take to finish and record its lines."""
        if not child.is_stopping:
            child.stop(within=2 * self._context.settings.shutdown_grace_seconds + 2 * _EXIT_SECONDS)

    async def _serve_child(self, child: "_WorkerProcess") -> None:
        try:
            while True:
                await self._handle(child, await child.receive())
        except asyncio.IncompleteReadError:
            pass
        except DecodeError as error:
            log.exception(
                "invalid message from worker process, killing it", extra={"pid": child.pid, "reason": str(error)}
            )
            child.kill()
        except asyncio.CancelledError:
            child.kill()
            raise
        finally:
            await self._reap(child)

    async def _handle(self, child: "_WorkerProcess", message: FromWorker) -> None:
        if isinstance(message, BatchLeftMessage):
            self._worker_role.on_batch_left()
            return
        self._context.metrics.remote.update(child.owner, message.samples)
        if isinstance(message, HeartbeatMessage):
            child.cpu_share = message.cpu_share
            lease = self._context.settings.lease_seconds
            shares = await self._fleet.heartbeat(message.report, caps=message.caps, lease=lease)
            child.send(SharesMessage(shares=shares))

    async def _reap(self, child: "_WorkerProcess") -> None:
        code = await child.wait()
        self._children.remove(child)
        await self._fleet.leave(child.owner)
        self._context.metrics.remote.remove(child.owner)
        self._worker_role.on_worker_exit()
        fields = {"pid": child.pid, "code": code, "processes": 1 + len(self._children)}
        if child.is_stopping and code == 0:
            log.info("worker process ended", extra=fields)
        else:
            log.warning("worker process died, its lines will run again", extra=fields)


class _WorkerProcess:
    def __init__(self, owner: str, process: Process) -> None:
        self.owner = owner
        self.cpu_share = 0.0
        self.is_stopping = False
        self._process = process
        self._kill_timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToWorker) -> None:
        """Write a message. Messages are small enough never to block; one to a dead child is lost."""
        cast(asyncio.StreamWriter, self._process.stdin).write(encode_message(message))

    async def receive(self) -> FromWorker:
        return await read_from_worker(cast(asyncio.StreamReader, self._process.stdout))

    def stop(self, *, within: float) -> None:
        self.is_stopping = True
        self.send(StopMessage())
        self._kill_timer = asyncio.get_running_loop().call_later(within, self.kill)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> int:
        """Return the exit code of a child that has closed its pipe, killing it if it does not end soon."""
        try:
            async with asyncio.timeout(_EXIT_SECONDS):
                code = await self._process.wait()
        except TimeoutError:
            self.kill()
            code = await self._process.wait()
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        cast(asyncio.StreamWriter, self._process.stdin).close()
        return code


async def _spawn() -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        # Without -P, a file in the current folder could be imported in place of a module.
        *("-P", "-m", "batchline.app.workers.child"),
        stdin=PIPE,
        stdout=PIPE,
        # A terminal sends Ctrl-C to the whole process group; this process decides when its children end.
        start_new_session=True,
        # The settings travel in the start message.
        env={name: value for name, value in os.environ.items() if not name.upper().startswith("BATCHLINE_")},
    )
