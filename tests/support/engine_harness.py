"""The whole engine on virtual time: real parts, a scripted upstream, and a store and objects that can fail."""

import asyncio
import json
import random
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from batchline.domain.errors import ObjectsDown, StoreDown
from batchline.domain.held_bytes import HeldBytes
from batchline.domain.models import DEFAULT_UPSTREAM
from batchline.domain.records import Batch, Owner
from batchline.domain.replies import Fault, FaultKind, Reply
from batchline.domain.states import TERMINAL
from batchline.engine import Context, Engine
from batchline.objects.local import LocalObjects
from batchline.pipeline.budget import Budgets
from batchline.pipeline.create import CreateRequest
from batchline.pipeline.damage import DamageLog
from batchline.pipeline.routing import SyncRouter
from batchline.pipeline.token_limit import TokenLimit
from batchline.ports import NewKey, Upstream
from batchline.settings import Settings
from batchline.store.sqlite.database import SqliteDatabase
from batchline.store.store import SqlStore
from batchline.telemetry.metrics import Metrics
from batchline.upstream.mock.script import Plan, Script
from tests.simulation.upstream import Machine, SimulatedUpstream
from tests.simulation.virtual import InlineThreads, InlineValidator, Loop, SeededRandom, Time, VirtualClock
from tests.support.identities import identity_of
from tests.support.webhook_receivers import MemorySender

CHAT = "/v1/chat/completions"
_PROJECTS = {"alpha": "11111111-1111-4111-8111-111111111111", "beta": "22222222-2222-4222-8222-222222222222"}
_LONGEST_CALL_SECONDS = 0.0005
_POLL_SECONDS = 0.1
_POLL_SHARE = 0.01
"""A condition is looked at again after this share of the time waited so far, so that a long wait takes few looks."""
_MAX_STEPS = 200_000

T = TypeVar("T")
Trouble = Callable[..., Awaitable[None]]

STORE_CALLS = (
    *(
        "claim",
        "renew_shards",
        "signals",
        "record",
        "release",
        "watch_leases",
        "rescue",
        "fail_interrupted",
        "expire",
        "lease_finalizable",
    ),
    *("renew_batch", "segments", "publish", "prunable", "delete_work", "expire_files", "referenced_keys"),
)
"""What a running engine asks of its store by itself."""


class _Troubles(dict[str, Trouble]):
    """Trouble by the name of a call. A name that the part does not have is an error, or a test would prove nothing."""

    def __init__(self, part: object) -> None:
        super().__init__()
        self._part = part

    def __setitem__(self, name: str, trouble: Trouble) -> None:
        assert hasattr(self._part, name), f"{type(self._part).__name__} has no call {name}"
        super().__setitem__(name, trouble)


class Port:
    """A port that calls ``trouble[name]``, if it is set, before each call of that name. Trouble may wait or raise."""

    def __init__(self, part: object) -> None:
        self._part = part
        self.trouble: dict[str, Trouble] = _Troubles(part)

    def __getattr__(self, name: str) -> Any:
        call, trouble = getattr(self._part, name), self.trouble.get(name)
        if trouble is None:
            return call

        async def meet_trouble(*args: Any, **named: Any) -> Any:
            await trouble(*args, **named)
            return await call(*args, **named)

        return meet_trouble


class _Upstream(SimulatedUpstream):
    """Lets connections that break together be noticed in an order that says nothing about which line caused it."""

    async def post(self, path: str, body: bytes) -> Reply:
        reply = await super().post(path, body)
        if isinstance(reply, Fault) and reply.kind is FaultKind.BROKEN:
            await asyncio.sleep(crc32(body) % 100 / 1000)
        return reply


class _Words:
    """Counts words as tokens."""

    async def count(self, body: bytes) -> int:
        return sum(len(message["content"].split()) for message in json.loads(body)["messages"])

    async def count_exactly(self, body: bytes) -> int:
        return await self.count(body)


class Bench:
    """An engine that can be killed and started again. Its folder, its upstreams and the time go on."""

    def __init__(
        self,
        folder: Path,
        *,
        plan: Plan | None = None,
        latency: float = 0.05,
        upstream: Callable[[Upstream, Callable[[], float]], Any] = lambda inner, _: inner,
        **settings: Any,
    ) -> None:
        """Start the engine. ``upstream`` wraps the scripted upstream, and gets a function that returns the time."""
        self.folder, self.time = folder, Time()
        self._stand_before = upstream
        self._latency, self._settings = latency, Settings(**{"upstream_url": "http://default/v1"} | settings)
        self.machines = {name: Machine(Script(plan), self.time) for name in self._settings.all_upstreams}
        self.machine = self.machines[DEFAULT_UPSTREAM]
        self._source = random.Random(1)
        self._owners: dict[str, Owner] = {}
        self._dead: list[tuple[Loop, SqliteDatabase, Engine]] = []
        self._steps = 0
        self.sender = MemorySender()
        self.start()

    def start(self) -> None:
        self.loop, clock = Loop(self.time), VirtualClock(self.time)
        threads, chance = InlineThreads(self._source, longest=_LONGEST_CALL_SECONDS), SeededRandom(self._source)
        self._database = SqliteDatabase(self.folder / "store.sqlite", clock=clock, writer=threads, reader=threads)
        self.rows = SqlStore(self._database)
        """The store without trouble, for the test itself."""
        self.store: Any = Port(self.rows)
        self.objects: Any = Port(LocalObjects(self.folder / "objects", threads, chance))
        self.router = SyncRouter(clock=clock)
        upstreams = {name: self._upstream(machine) for name, machine in self.machines.items()}
        self.upstream = upstreams[DEFAULT_UPSTREAM]
        self.metrics = Metrics()
        context = Context(
            settings=self._settings,
            store=self.store,
            objects=self.objects,
            identity=identity_of(self.rows, self.objects, chance),
            upstreams=upstreams,
            held_bytes=HeldBytes(self._settings.max_held_bytes),
            budgets=Budgets(metered=self._settings.metering, day_limits=self._settings.day_limits),
            token_limit=TokenLimit(tokens=dict.fromkeys(self.machines, _Words())),
            router=self.router,
            clock=clock,
            random=chance,
            metrics=self.metrics,
            damage_log=DamageLog(self.metrics),
            owner=chance.bytes(8).hex(),
            event_sender=self.sender,
        )
        self.engine = Engine(context, validator=InlineValidator(threads))
        self._claimed = self.loop.create_task(context.identity.claim())
        self._running = self.loop.create_task(self._run(self._claimed))

    async def _run(self, claimed: asyncio.Task[None]) -> None:
        await claimed
        await self.engine.run()

    def _upstream(self, machine: Machine) -> Any:
        scripted = _Upstream(
            machine,
            request_timeout=self._settings.request_timeout_seconds,
            latency=self._latency,
            kill_worker=lambda: None,
        )
        return self._stand_before(scripted, lambda: self.time.now)

    def skip(self, seconds: float) -> None:
        """Let time pass in which the process does not run, as on a suspended machine. All that is due runs once."""
        self.time.now += seconds

    def kill(self) -> None:
        """Run nothing more of this process. Its leases stay in the store."""
        self._dead.append((self.loop, self._database, self.engine))

    def play(self, scene: Coroutine[Any, Any, T], *, seconds: float = 4000.0) -> T:
        """Run until the scene ends, which must happen within so many virtual seconds."""
        playing = self.loop.create_task(self._play(scene))
        until = self.time.now + seconds
        while not playing.done():
            self._step(until)
        return playing.result()

    async def _play(self, scene: Coroutine[Any, Any, T]) -> T:
        await self._claimed
        return await scene

    def close(self) -> None:
        self.kill()
        for loop, database, engine in self._dead:
            database.close()
            self._bury(loop, engine)

    async def stopped(self) -> None:
        """Stop the engine, as SIGTERM does, and wait for its end."""
        self.engine.stop()
        await self._running

    async def batch(self, prompts: Iterable[str], *, project: str = "alpha", model: str = "m", **options: Any) -> Batch:
        """Create a batch and return it. Prompts must differ from each other."""
        return await self.batch_of((_chat(prompt, model) for prompt in prompts), project=project, **options)

    async def batch_of(self, bodies: Iterable[object], *, project: str = "alpha", **options: Any) -> Batch:
        lines = [_line(f"line-{n}", body) for n, body in enumerate(bodies)]
        owner = await self.owner(project)
        async with self.engine.api_role.services.upload.begin(owner.project_id) as incoming:
            await incoming.write(b"".join(lines))
            file = await incoming.finish(filename=None, expires_after=None)
        request = CreateRequest(input_file_id=file.id, endpoint=CHAT, metadata=b"{}", **options)
        answer = await self.engine.api_role.services.creator.create(
            owner, request, idempotency_key=None, retried=False, admit=lambda: None
        )
        assert answer.status == 200, answer.body
        return await self.seen(answer.batch_id)

    async def seen(self, batch_id: str) -> Batch:
        for owner in self._owners.values():
            if (batch := await self.rows.batch(owner.project_id, batch_id)) is not None:
                return batch
        raise AssertionError(f"{batch_id} does not exist")

    async def until(self, batch: Batch, condition: Callable[[Batch], bool]) -> Batch:
        """Wait until a condition holds for the batch, and return it as it is then."""
        since = self.time.now
        while True:
            seen = await self.seen(batch.id)
            if condition(seen):
                return seen
            await asyncio.sleep(max(_POLL_SECONDS, _POLL_SHARE * (self.time.now - since)))

    async def ended(self, batch: Batch) -> Batch:
        return await self.until(batch, lambda seen: seen.status in TERMINAL)

    async def records(self, batch: Batch) -> dict[str, Any]:
        """Return the result of each line by its custom_id; each must be in one of the two files, once."""
        found: dict[str, Any] = {}
        for file_id in (batch.output_file_id, batch.error_file_id):
            for line in (await self.content(batch.project_id, file_id)).splitlines():
                record = json.loads(line)
                assert record["custom_id"] not in found, "a line has two results"
                found[record["custom_id"]] = record
        assert len(found) == batch.total == batch.completed + batch.failed
        return found

    async def failures(self, batch: Batch) -> dict[str, str]:
        """Return the error messages of the lines that failed, by their custom_ids."""
        records = await self.records(batch)
        return {name: record["error"]["message"] for name, record in records.items() if record["error"]}

    async def fund(self, amount: int, *, project: str = "alpha") -> None:
        owner = await self.owner(project)
        await self.rows.set_funds(owner.organization_id, balance=amount, credits=0, at=0)

    async def funds(self, project: str = "alpha") -> int:
        owner = await self.owner(project)
        (left,) = [found for found in await self.rows.organizations() if found.id == owner.organization_id]
        return left.balance + left.credits

    def attempts(self, word: str) -> int:
        """Return how many requests with this word were sent to any upstream."""
        starts = [start for machine in self.machines.values() for start in machine.starts.items()]
        return sum(times for body, times in starts if word.encode() in body)

    def take_store_away(self, seconds: float) -> None:
        """Let every call of the engine wait, as SQLite does for a lock, and then fail."""
        until = self.time.now + seconds

        async def be_away(*_: Any, **__: Any) -> None:
            if self.time.now < until:
                await asyncio.sleep(2)
                raise StoreDown("away")

        for name in STORE_CALLS:
            self.store.trouble[name] = be_away

    def take_disk_away(self, seconds: float) -> None:
        """Let no object be written."""
        until = self.time.now + seconds

        async def be_full(*_: Any, **__: Any) -> None:
            if self.time.now < until:
                raise ObjectsDown("full")

        for name in ("put", "create"):
            self.objects.trouble[name] = be_full

    async def owner(self, project: str) -> Owner:
        if project not in self._owners:
            self._owners[project] = await self.rows.create_key(
                NewKey(
                    key_id=f"key_{project}",
                    digest=project.encode(),
                    hint="",
                    project=project,
                    project_id=_PROJECTS[project],
                    organization=project,
                    organization_id=f"organization of {project}",
                    at=0,
                )
            )
        return self._owners[project]

    async def content(self, project_id: str, file_id: str | None) -> bytes:
        if file_id is None:
            return b""
        file = await self.engine.api_role.services.download.find(project_id, file_id)
        chunks = await self.engine.api_role.services.download.open(file, start=0, length=file.bytes)
        return b"".join([chunk async for chunk in chunks])

    def _step(self, until: float) -> None:
        due = self.loop.next_due()
        self._steps += 1
        assert due is not None, "nothing is scheduled, so the scene never ends"
        assert due <= until, "the scene did not end in time"
        assert self._steps < _MAX_STEPS, "too many steps: a busy loop?"
        self.time.now = max(self.time.now, due)
        self.loop.step()
        if self._running.done() and (error := self._running.exception()):
            raise error

    def _bury(self, loop: Loop, engine: Engine) -> None:
        """Cancel and finish every task of a killed process, so that no resource stays open.

        A file that it had just opened is closed with the task that was to get it.
        """
        loop.discarded = True
        engine.stop()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            for task in (tasks := asyncio.all_tasks(loop)):
                task.cancel()
            while not all(task.done() for task in tasks) and (due := loop.next_due()) is not None:
                self.time.now = max(self.time.now, due)
                loop.step()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    task.exception()
            loop.close()


def _chat(prompt: str, model: str) -> object:
    return {"model": model, "messages": [{"role": "user", "content": prompt}]}


def _line(custom_id: str, body: object) -> bytes:
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}).encode() + b"\n"
