"""One process of the service, from its start to its end, with the connections of clients to it."""

import asyncio
import contextlib
from typing import TYPE_CHECKING

from batchline.domain.errors import ObjectsDown, StoreDown, WrongIdentity
from batchline.domain.held_bytes import HeldBytes
from batchline.domain.records import Batch
from batchline.engine import Context, Engine, Intervals
from batchline.objects.local import LocalObjects
from batchline.pipeline.budget import Budgets
from batchline.pipeline.damage import DamageLog
from batchline.pipeline.download import Download
from batchline.pipeline.routing import SyncRouter
from batchline.pipeline.token_limit import TokenLimit
from batchline.ports import NewKey, Objects, WatchedClock
from batchline.store.postgres.clock import DatabaseClock
from batchline.store.sql import Database
from batchline.store.sqlite.clock import ClockFile, TrustedClock
from batchline.store.sqlite.database import SqliteDatabase
from batchline.store.store import SqlStore
from batchline.telemetry.metrics import Metrics
from tests.simulation.client import ORGANIZATION, Client
from tests.simulation.clocks import CalledThreads, MachineClock, SharedDatabase, WallClock
from tests.simulation.end_checks import EndChecks
from tests.simulation.faults import FailingDatabase, FailingObjects
from tests.simulation.invariants import require
from tests.simulation.upstream import Machine, SimulatedUpstream
from tests.simulation.virtual import InlineThreads, InlineValidator, Loop, SeededRandom, VirtualClock
from tests.support.identities import identity_of
from tests.support.webhook_receivers import MemorySender

if TYPE_CHECKING:
    from tests.simulation.world import World


class Process:
    """A process on one of the machines. ``is_peer`` says that it has no clients."""

    def __init__(self, world: "World", *, wall: WallClock, is_peer: bool = False) -> None:
        self.world, self.is_peer = world, is_peer
        self.loop = Loop(world.time)
        threads = InlineThreads(world.source, longest=world.plan.disk_latency)
        self._random, self.metrics = SeededRandom(world.source), Metrics()
        self.database, self.clock = self._open(MachineClock(world.time, wall, world.source), threads)
        self.rows = SqlStore(self.database)
        """The store without faults, for the checks."""
        self.stored = LocalObjects(world.folder / "objects", threads, self._random)
        self.store, self.objects = self._with_faults()
        self.identity = identity_of(self.store, self.objects, self._random)
        self.engine = Engine(self._context(), validator=InlineValidator(threads), shared=world.plan.shared)
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

    def _with_faults(self) -> tuple[SqlStore, Objects]:
        if not self.world.plan.storage_fails:
            return self.rows, self.stored
        database: Database = FailingDatabase(self.database, self.world.store_faults)
        return SqlStore(database), FailingObjects(self.stored, self.world.object_faults)

    def _context(self) -> Context:
        plan = self.world.plan
        return Context(
            settings=plan.settings,
            store=self.store,
            objects=self.objects,
            identity=self.identity,
            upstreams={name: self._upstream(machine) for name, machine in self.world.machines.items()},
            held_bytes=HeldBytes(plan.settings.max_held_bytes),
            budgets=Budgets(metered=plan.settings.metering),
            token_limit=TokenLimit(tokens={}),
            router=SyncRouter(clock=self.clock),
            clock=self.clock,
            random=self._random,
            metrics=self.metrics,
            damage_log=DamageLog(self.metrics),
            owner=self._random.bytes(8).hex(),
            event_sender=MemorySender(),
            intervals=Intervals(sweep_seconds=plan.sweep_seconds),
        )

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

    async def results(self, batch: Batch) -> tuple[bytes, bytes] | None:
        """Return the output and the errors of a batch, or None if one of them was rightly removed."""
        contents = []
        for file_id in (batch.output_file_id, batch.error_file_id):
            if file_id is not None:
                self.world.files.note_created(file_id, at=self.world.observer.last_open_at(batch))
            contents.append(await self.content(batch.project_id, file_id))
        output, errors = contents
        return None if output is None or errors is None else (output, errors)

    async def content(self, project_id: str, file_id: str | None) -> bytes | None:
        """Return the content of a file, or None if it was rightly removed."""
        download = Download(files=self.rows, objects=self.stored, clock=self.clock, damage_log=DamageLog(self.metrics))
        return await self.world.files.content(download, self.rows, project_id, file_id)

    async def _live(self) -> None:
        await self.clock.check()
        await self._prepare()
        await self._claim_objects()
        if self.world.plan.stranger and not self.is_peer:
            await self._refuse_stranger()
        async with asyncio.TaskGroup() as group:
            running = group.create_task(self.engine.run())
            self.clients = group.create_task(self._clients())
            await asyncio.wait([running, self.clients], return_when=asyncio.FIRST_COMPLETED)
            if running.done() or self.is_peer or self.dies_at is not None:
                await running
            else:
                checking = group.create_task(EndChecks(self).run())
                await asyncio.wait([running, checking], return_when=asyncio.FIRST_COMPLETED)
                self.finished = checking.done()
                checking.cancel()
            self.clients.cancel()
            self.engine.stop()
        self.stopped = not self.finished

    async def _prepare(self) -> None:
        """Create the keys and the money that do not exist yet, as an operator does."""
        for n, plan in enumerate(self.world.plan.batches):
            new = NewKey(
                key_id=plan.key_id,
                digest=bytes([n]),
                hint="",
                project=f"project of {plan.project_id}",
                project_id=plan.project_id,
                organization=ORGANIZATION,
                organization_id=ORGANIZATION,
                at=0,
            )
            with contextlib.suppress(Exception):
                await self.rows.create_key(new)
        if not await self.rows.entries(ORGANIZATION):
            await self.rows.set_funds(ORGANIZATION, balance=self.world.plan.funds, credits=None, at=0)

    async def _claim_objects(self) -> None:
        """Claim the objects. A process that cannot do so ends, and is started again."""
        while True:
            try:
                return await self.identity.claim()
            except (StoreDown, ObjectsDown):
                await asyncio.sleep(1)

    async def _refuse_stranger(self) -> None:
        """Check that a process with another, empty database does not start on these objects."""
        threads = CalledThreads()
        path = self.world.folder / f"stranger-{self._random.bytes(4).hex()}.sqlite"
        database = SqliteDatabase(path, clock=VirtualClock(self.world.time), writer=threads, reader=threads)
        try:
            await identity_of(SqlStore(database), self.stored, self._random).claim()
        except WrongIdentity:
            return
        finally:
            database.close()
        require(False, "a process with another database started on the same objects")

    async def _clients(self) -> None:
        async with asyncio.TaskGroup() as group:
            for plan in [] if self.is_peer or self.dies_at is not None else self.world.plan.batches:
                group.create_task(Client(self, plan).run())
