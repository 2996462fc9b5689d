"""Creates a data folder with batches in every state, as a killed service leaves it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from batchline.domain.records import Batch, Charge, Owner, Segment
from batchline.domain.usage import Usage
from batchline.ports import Store
from batchline.store.sqlite.database import SqliteDatabase
from batchline.store.store import SqlStore
from batchline.system import ThreadPool
from tests.support.clocks import SettableClock
from tests.support.stores import LEASE, NOW, OTHER, World, moved_on

T = TypeVar("T")
ODD = "odd\0model\x10"
"""A name that JSON can hold, and PostgreSQL's text cannot."""


class Folder:
    """A data folder, and a store on its database."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def put(self, key: str, data: bytes) -> None:
        target = self.path / "objects" / key
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    def play(self, work: Callable[[World], Awaitable[T]]) -> T:
        async def run() -> T:
            async with self._world() as world:
                return await work(world)

        return asyncio.run(run())

    @asynccontextmanager
    async def _world(self) -> AsyncIterator[World]:
        writer, reader = ThreadPool(1, name="writer"), ThreadPool(1, name="reader")
        database = SqliteDatabase(
            self.path / "batchline.sqlite", clock=SettableClock(now=NOW), writer=writer, reader=reader
        )

        try:
            yield world_on(SqlStore(database))
        finally:
            writer.close()
            reader.close()
            database.close()


def world_on(store: Store) -> World:
    """Return a store in which no process dies and no time passes."""

    async def nothing(_: object) -> None: ...

    return World(store, pass_time=nothing, lose_time=nothing, die=nothing, set_time=nothing)


class Busy:
    """One batch in every state, by the name of the state; each has the objects that its rows refer to."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.batches: dict[str, str] = {}
        self.owner: Owner
        self.digest = b""
        folder.play(self._fill)

    async def _fill(self, world: World) -> None:
        store = world.store
        self.owner = await world.owner()
        self.digest = self.owner.key_id.encode()
        await store.set_funds(self.owner.organization_id, balance=1_000_000, credits=500, at=NOW)
        await self._files(world)
        await self._finished(world)
        await self._finalizing(world)
        await self._half_run(world)
        await self._cancelled(world)
        self.batches["open"] = (await self._running(world, shards=(3,), model=ODD)).id
        self.batches["validating"] = (await world.validating(self.owner, holder=OTHER)).id

    async def _files(self, world: World) -> None:
        for name in ("one", "two"):
            file = await world.stored(self.owner, filename=f"{name}\0.jsonl")
            self._folder.put(file.object_key, name.encode())
        deleted = await world.stored(self.owner)
        await world.store.delete_file(self.owner.project_id, deleted.id, at=NOW)
        unfinished = world.file(self.owner, id="file-unfinished", object_key="uploads/file-unfinished")
        await world.store.begin_upload(unfinished, owner=OTHER, lease=LEASE)

    async def _finished(self, world: World) -> None:
        """Create a published batch whose work is half deleted."""
        batch = await self._running(world, shards=(2,))
        self.batches["finished"] = batch.id
        await world.record_all(await world.claim())
        finish = await world.finish()
        result = world.file(self.owner, purpose="batch_output", object_key=f"results/{batch.id}/2-output")
        self._folder.put(result.object_key, b"result")
        await world.publish(finish, files=[result])
        (self._folder.path / "objects" / f"work/{batch.id}/1").unlink()

    async def _finalizing(self, world: World) -> None:
        self.batches["finalizing"] = (await self._running(world, shards=(2,))).id
        await world.record_all(await world.claim())
        await world.finish(holder=OTHER)

    async def _half_run(self, world: World) -> None:
        """Create a batch with a leased shard. One line is recorded, in a segment that is an object, and charged."""
        batch = await self._running(world, shards=(4, 4))
        self.batches["half run"] = batch.id
        [first, _] = await world.claim(holder=OTHER)
        _, progress = moved_on(first, [1])
        key = f"segments/{batch.id}/other-1"
        self._folder.put(key, b"+")
        await world.store.record(
            batch.id,
            owner=OTHER,
            progress=[progress],
            segment=Segment(output_bytes=1, error_bytes=0, object_key=key, data=None),
            charges=[Charge(model="m", requests=1, cost=700, usage=Usage(input_tokens=3, output_tokens=4))],
            at=NOW,
        )

    async def _cancelled(self, world: World) -> None:
        batch = await self._running(world, shards=(4,))
        self.batches["cancelled"] = batch.id
        [shard] = [shard for shard in await world.claim(holder=OTHER) if shard.batch_id == batch.id]
        await world.record(shard, [0])
        await world.store.cancel_batch(batch.project_id, batch.id, at=NOW)

    async def _running(self, world: World, **changes: Any) -> Batch:
        batch = await world.running(self.owner, **changes)
        self._folder.put(f"work/{batch.id}/1", b"work of " + batch.id.encode())
        return batch
