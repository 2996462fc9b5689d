"""A simulated world: one folder, upstreams, clients, and a service that is killed and started again."""

import asyncio
import contextlib
import gc
import json
import logging
import random
import shutil
import tempfile
import warnings
from pathlib import Path
from unittest import mock

from batchline.domain.errors import ApiError, LeaseLost, ObjectsDown, StoreDown
from batchline.domain.held_bytes import HeldBytes
from batchline.domain.records import Batch, Owner
from batchline.domain.states import TERMINAL, BatchStatus
from batchline.engine import Context, Engine, Intervals
from batchline.objects.local import LocalObjects
from batchline.pipeline import record
from batchline.pipeline.create import CreateRequest
from batchline.pipeline.routing import SyncRouter
from batchline.pipeline.token_limit import TokenLimit
from batchline.ports import NewKey, WatchedClock
from batchline.store.postgres.clock import DatabaseClock
from batchline.store.sqlite.clock import TOLERANCE_SECONDS, ClockFile, TrustedClock
from batchline.store.sqlite.database import SqliteDatabase
from batchline.store.store import SqlStore
from batchline.telemetry.metrics import Metrics
from batchline.upstream.mock.script import Script
from tests.simulation.clocks import CalledThreads, MachineClock, SharedDatabase, WallClock
from tests.simulation.invariants import BatchObserver, check_errors, check_files, check_money, check_standing, require
from tests.simulation.plan import ENDPOINT, BatchPlan, Disturbance, Plan, make_plan
from tests.simulation.upstream import Machine, SimulatedUpstream
from tests.simulation.virtual import InlineThreads, InlineValidator, Loop, SeededRandom, Time, VirtualClock
from tests.support.identities import identity_of

_MOST_STEPS = 3_000_000
_LONGEST = 3900.0
_SWEEP_SECONDS = 15.0
_PROJECTS = ["11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"]
_SHM = Path("/dev/shm")


class World:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.source = random.Random(seed)
        self.time = Time()
        self.folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=_SHM if _SHM.is_dir() else None))
        self.plan: Plan = make_plan(self.source, _PROJECTS)
        self.observer = BatchObserver(self.plan, self.time)
        self.machines = {name: Machine(Script(seed=seed), self.time) for name in self.plan.settings.all_upstreams}
        self.log = ErrorLog()
        self.steps = 0
        self.clocks = [WallClock() for _ in range(2 if self.plan.shared else 1)]
        self.processes: list[Process] = []
        self.dead: list[Process] = []

    def run(self) -> None:
        """Run from the first start to the end of the last batch. Raise if an invariant is violated."""
        try:
            with (
                mock.patch.object(record, "INLINE_SEGMENT_BYTES", self.plan.inline_bytes),
                self.log,
            ):
                self._run()
        finally:
            self._discard_processes()
            shutil.rmtree(self.folder)

    def _run(self) -> None:
        disturbances = list(self.plan.disturbances)
        if self.plan.shared:
            self._start_peer()
        self._start()
        while not self.processes[-1].finished:
            if disturbances and disturbances[0].step <= self.steps:
                self._disturb(disturbances.pop(0))
            self._step()
        require(len(self.observer.seen) >= len(self.plan.batches), "a client has no batch")

    def _discard_processes(self) -> None:
        """Unwind all processes. Killed ones leave files open, as they should."""
        with ErrorLog(), warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            for process in (*self.processes, *self.dead):
                process.discard()
            self.processes, self.dead = [], []
            # A coroutine that is collected closes, which may leave another cycle with an open file behind.
            for _ in range(3):
                gc.collect()

    def _start(self) -> None:
        self.processes.append(Process(self, wall=self.clocks[0]))

    def _start_peer(self) -> None:
        """Start a process on the second machine, which has no clients."""
        self.processes.insert(0, Process(self, wall=self.clocks[1], is_peer=True))

    def _disturb(self, disturbance: Disturbance) -> None:
        process = self.processes[-1]
        if disturbance.kind == "outage":
            for machine in self.machines.values():
                machine.crash(disturbance.seconds)
        elif disturbance.kind == "clock":
            self.source.choice(self.clocks).error = disturbance.seconds
        elif disturbance.kind == "stop" and not process.clients.done():
            process.stop()
        elif disturbance.kind == "freeze":
            process.frozen_until = self.time.now + disturbance.seconds
            process.dies_at = process.frozen_until + 2
            process.clients.cancel()
            self._start()
        elif disturbance.kind == "kill":
            self._kill(self.source.choice([process, self.processes[0]]))

    def _kill(self, process: "Process") -> None:
        self.processes.remove(process)
        self.dead.append(process)
        process.database.close()
        if process.is_peer:
            self._start_peer()
        elif process.dies_at is None or all(other.is_peer for other in self.processes):
            self._start()

    def _step(self) -> None:
        self.steps += 1
        # A frozen process may wake after its files were rightly removed.
        require(self.plan.zombies or not self.log.errors, f"the log has errors: {self.log.errors}")
        require(
            self.steps < _MOST_STEPS and self.time.now < _LONGEST,
            f"no end: {self._state()}",
        )
        for process in list(self.processes):
            if process.stopped or process.killed or (process.dies_at is not None and self.time.now >= process.dies_at):
                self._kill(process)
        turn = min(self.processes, key=Process.due)
        require(turn.due() < float("inf"), f"no callback is scheduled: {self._state()}")
        self.time.now = max(self.time.now, turn.due())
        turn.step()

    def _state(self) -> str:
        return f"seed {self.seed}, {self.time.now:.1f} s, {[(b.id, b.status) for b in self.observer.seen.values()]}"


class Process:
    """One process of the service, from its start to its end, with the connections of clients to it."""

    def __init__(self, world: World, *, wall: WallClock, is_peer: bool = False) -> None:
        self.world, self.is_peer = world, is_peer
        self.loop = Loop(world.time)
        threads = InlineThreads(world.source, longest=world.plan.disk_latency)
        self.database, self.clock = self._open(MachineClock(world.time, wall, world.source), threads)
        self.store = SqlStore(self.database)
        rand = SeededRandom(world.source)
        self.objects = LocalObjects(world.folder / "objects", threads, rand)
        self.identity = identity_of(self.store, self.objects, rand)
        context = Context(
            settings=world.plan.settings,
            store=self.store,
            objects=self.objects,
            identity=self.identity,
            upstreams={name: self._upstream(machine) for name, machine in world.machines.items()},
            held_bytes=HeldBytes(world.plan.settings.max_held_bytes),
            token_limit=TokenLimit(tokens={}),
            router=SyncRouter(clock=self.clock),
            clock=self.clock,
            random=rand,
            metrics=Metrics(),
            owner=rand.bytes(8).hex(),
            intervals=Intervals(sweep_seconds=_SWEEP_SECONDS),
        )
        self.engine = Engine(context, validator=InlineValidator(threads), shared=world.plan.shared)
        self.killed = self.stopped = self.finished = False
        self.frozen_until = 0.0
        self.dies_at: float | None = None
        self.clients: asyncio.Future[None] = self.loop.create_future()
        self.main = self.loop.create_task(self._live())

    def _open(self, machine: MachineClock, threads: InlineThreads) -> tuple[SqliteDatabase, WatchedClock]:
        path = self.world.folder / "db.sqlite"
        if self.world.plan.shared:
            database = SharedDatabase(path, clock=VirtualClock(self.world.time), writer=threads, reader=threads)
            return database, DatabaseClock(machine, database)
        clock = TrustedClock(machine, file=ClockFile(self.world.folder), threads=CalledThreads())
        return SqliteDatabase(path, clock=clock, writer=threads, reader=threads), clock

    def _upstream(self, machine: Machine) -> SimulatedUpstream:
        return SimulatedUpstream(
            machine,
            request_timeout=self.world.plan.settings.request_timeout_seconds,
            latency=self.world.plan.latency,
            kill_worker=self._on_kill,
        )

    def due(self) -> float:
        due = self.loop.next_due()
        return float("inf") if due is None else max(due, self.frozen_until)

    def step(self) -> None:
        self.loop.step()
        if self.main.done() and not self.main.cancelled() and (error := self.main.exception()):
            raise error

    def stop(self) -> None:
        self.loop.call_soon(self.engine.stop)

    def _on_kill(self) -> None:
        self.killed = True

    def discard(self) -> None:
        """Unwind the tasks of the process, which were never continued after its death, and close its loop."""
        self.database.close()
        self.loop.discarded = True
        self.engine.stop()
        for task in (tasks := asyncio.all_tasks(self.loop)):
            task.cancel()
        while not all(task.done() for task in tasks) and (due := self.loop.next_due()) is not None:
            self.world.time.now = max(self.world.time.now, due)
            self.loop.step()
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()
        self.loop.close()

    async def _live(self) -> None:
        await self.clock.check()
        for n, project_id in enumerate(_PROJECTS):
            with contextlib.suppress(Exception):
                await self.store.create_key(
                    NewKey(
                        key_id=f"key_{n}",
                        digest=bytes([n]),
                        hint="",
                        project=f"project {n}",
                        project_id=project_id,
                        organization="org",
                        organization_id="org",
                        at=0,
                    )
                )
        if not await self.store.entries("org"):
            await self.store.set_funds("org", balance=self.world.plan.funds, credits=None, at=0)
        await self.identity.claim()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(self.engine.run())
            self.clients = group.create_task(self._clients())
            await asyncio.wait([running, self.clients], return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                self.clients.cancel()
                self.stopped = True
            elif self.is_peer or self.dies_at is not None:
                await running
            else:
                await self._check_end()
                self.engine.stop()
                await running
                self.finished = True

    async def _clients(self) -> None:
        async with asyncio.TaskGroup() as group:
            for plan in [] if self.is_peer or self.dies_at is not None else self.world.plan.batches:
                group.create_task(self._client(plan))

    async def _client(self, plan: BatchPlan) -> None:
        """Try until the batch is done, as a client with retries does."""
        while not plan.done and self.dies_at is None:
            try:
                await self._trip(plan)
            except (ApiError, StoreDown, ObjectsDown, LeaseLost):
                await asyncio.sleep(0.5)

    async def _trip(self, plan: BatchPlan) -> None:
        await asyncio.sleep(max(0.0, plan.starts_at - self.world.time.now))
        owner = Owner(
            key_id=f"key_{_PROJECTS.index(plan.project_id)}", project_id=plan.project_id, organization_id="org"
        )
        if plan.file_id is None:
            plan.file_id = await self._upload(plan)
        if plan.batch_id is None:
            self.world.observer.note_create(plan.file_id, at=self.world.time.now)
            plan.batch_id = await self._create(plan, owner)
        batch = await self._follow(plan)
        await self._check(batch, plan)
        plan.done = True

    async def _upload(self, plan: BatchPlan) -> str:
        data = plan.input()
        middle = len(data) // 2
        async with self.engine.api_role.services.upload.begin(plan.project_id) as incoming:
            await incoming.write(data[:middle])
            await asyncio.sleep(0.01)
            await incoming.write(data[middle:])
            return (await incoming.finish(filename=None, expires_after=None)).id

    async def _create(self, plan: BatchPlan, owner: Owner) -> str:
        answer = await self.engine.api_role.services.creator.create(
            owner,
            CreateRequest(input_file_id=plan.file_id or "", endpoint=ENDPOINT, metadata=b"{}"),
            idempotency_key=plan.idempotency_key,
            retried=False,
            admit=lambda: None,
        )
        if answer.status != 200:
            require(b"interrupted" in answer.body, f"create refused: {answer.body!r}")
            if self.dies_at is None:
                plan.idempotency_key = None
            raise StoreDown("create again")
        body = json.loads(answer.body)
        require(body["status"] in ("in_progress", "cancelled"), f"created as {body['status']}")
        batch_id: str = body["id"]
        return batch_id

    async def _follow(self, plan: BatchPlan) -> Batch:
        """Poll until the batch is terminal, and cancel it at the planned time."""
        assert plan.batch_id is not None
        born = self.world.time.now
        while True:
            snapshot = await self.store.snapshot(plan.project_id, plan.batch_id)
            if self.dies_at is not None:
                raise asyncio.CancelledError
            require(snapshot is not None, f"{plan.batch_id} was acknowledged and does not exist")
            assert snapshot is not None
            batch = snapshot.batch
            self.world.observer.check(batch)
            check_standing(snapshot)
            if batch.status in TERMINAL:
                return batch
            if plan.cancel_after is not None and self.world.time.now >= born + plan.cancel_after:
                self.world.observer.check(
                    await self.engine.api_role.services.cancellation.cancel(plan.project_id, plan.batch_id)
                )
                plan.cancel_after = None
            await asyncio.sleep(self.world.source.choice([0.02, 0.3, 2.0]))

    async def _check(self, batch: Batch, plan: BatchPlan) -> None:
        if batch.status is BatchStatus.CANCELLED and batch.total == 0:
            return
        output = await self._content(plan.project_id, batch.output_file_id)
        errors = await self._content(plan.project_id, batch.error_file_id)
        check_files(batch, plan, output, errors, world=self.world.plan)
        snapshot = await self.store.snapshot(plan.project_id, batch.id)
        require(snapshot is not None, f"{batch.id} does not exist")
        assert snapshot is not None
        check_errors(snapshot, errors)

    async def _content(self, project_id: str, file_id: str | None) -> bytes:
        if file_id is None:
            return b""
        file = await self.engine.api_role.services.download.find(project_id, file_id)
        chunks = await self.engine.api_role.services.download.open(file, start=0, length=file.bytes)
        data = b"".join([chunk async for chunk in chunks])
        require(len(data) == file.bytes, f"{file_id} is not whole")
        return data

    async def _check_end(self) -> None:
        """Check that every batch ends, also if its client got no reply, and that no work file or segment remains.

        If a machine has a wrong clock, what is kept for a time after the end may be kept for longer.
        """
        for project_id in _PROJECTS:
            while True:
                batches = await self.store.batches(project_id, after=None, limit=1000) or []
                for batch in batches:
                    self.world.observer.check(batch)
                if all(batch.status in TERMINAL for batch in batches):
                    break
                await asyncio.sleep(5)
        # A frozen process may wake as late as now and write a segment under a lease that it lost. Only a sweep after
        # its death is sure to remove that.
        last_death = max(process.dies_at or 0.0 for process in self.world.processes)
        kept_for = self.world.plan.settings.work_retention_seconds + TOLERANCE_SECONDS + 2 * _SWEEP_SECONDS
        await asyncio.sleep(max(0.0, last_death - self.world.time.now) + kept_for)
        await self._check_money()
        await self._check_inputs()
        for folder in ("work", "segments"):
            left = await self.objects.names(folder)
            known = await self.store.known_batches(left)
            kept = [batch_id for batch_id in left if batch_id in known and known[batch_id].has_work]
            require(left == (kept if self.world.plan.doubts_clock else []), f"{folder} is not empty at the end")

    async def _check_inputs(self) -> None:
        """Check that no input file was deleted: all are far younger than the time for which files are kept."""
        for plan in self.world.plan.batches:
            require(await self._content(plan.project_id, plan.file_id) == plan.input(), f"{plan.file_id} has changed")

    async def _check_money(self) -> None:
        """Check that the charges are the costs of the lines in all output files."""
        answers: list[bytes] = []
        short = 0
        for project_id in _PROJECTS:
            for batch in await self.store.batches(project_id, after=None, limit=1000) or []:
                answers += (await self._content(project_id, batch.output_file_id)).splitlines()
                short += (await self._content(project_id, batch.error_file_id)).count(b'"insufficient_quota"')
        (organization,) = await self.store.organizations()
        entries = await self.store.entries("org")
        check_money(self.world.plan, organization, entries, answers=answers, short=short)


class ErrorLog(logging.Handler):
    """The log of the service, which is not printed. An error in it fails the world: no disturbance excuses one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.errors: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.errors.append(f"{record.getMessage()}: {record.exc_info[1] if record.exc_info else ''}")

    def __enter__(self) -> "ErrorLog":
        self._logger = logging.getLogger("batchline")
        self._logger.addHandler(self)
        self._logger.propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True
