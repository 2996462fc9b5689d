"""A service's places as they are after many batches: made through the store, without sending anything."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from batchline.app import migrate_store, open_store
from batchline.app.backends import hold_objects
from batchline.cli.new_key import new_key, new_secret
from batchline.domain import ids
from batchline.domain.records import BATCH, BATCH_OUTPUT, Batch, File, NewShard, Owner, Segment, Shard, ShardProgress
from batchline.domain.states import BatchStatus
from batchline.ports import NewBatch, Objects, Store
from batchline.settings import DAY, Settings
from batchline.system import SystemClock, SystemRandom
from bench.lines import CHAT
from bench.services import Places

_OWNER = "filling"
_LEASE = 600.0
_AT_ONCE = 500
"""Batches made side by side, which share their commits."""
_LINE = b'{"custom_id":"line-0","response":null}\n'
_ONE_LINE = NewShard(offset=0, length=len(_LINE), lines=1, model="bench")

_random, _clock = SystemRandom(), SystemClock()


def fill(places: Places, batches: int) -> None:
    """Add so many completed batches of one line each, with their files."""
    asyncio.run(_fill(Settings(**places), batches))


async def _fill(settings: Settings, batches: int) -> None:
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    await migrate_store(settings)
    async with open_store(settings) as store, hold_objects(settings) as objects:
        owner = await store.create_key(new_key(new_secret(), project="default", organization="default"))
        filling = _Filling(store, objects, owner)
        for first in range(0, batches, _AT_ONCE):
            await filling.add(min(_AT_ONCE, batches - first))


class _Filling:
    def __init__(self, store: Store, objects: Objects, owner: Owner) -> None:
        self._store, self._objects, self._owner = store, objects, owner

    async def add(self, count: int) -> None:
        await _together(self._start() for _ in range(count))
        await _together(self._record(shard) for shard in await self._claim(count))
        await _together(self._finish() for _ in range(count))

    async def _start(self) -> None:
        file = await self._file(f"uploads/{_random.bytes(8).hex()}", purpose=BATCH)
        await self._store.begin_upload(file, owner=_OWNER, lease=_LEASE)
        await self._store.finish_upload(file, owner=_OWNER)
        batch = self._batch(file)
        await self._store.begin_batch(
            NewBatch(batch=batch, digest=_random.bytes(16)), owner=_OWNER, lease=_LEASE, since=0
        )
        await self._store.start_batch(
            batch.id, epoch=batch.epoch, shards=[_ONE_LINE], total=1, work_key=f"work/{batch.id}/0", at=_now()
        )
        await self._store.mark_answered(batch.id)

    async def _claim(self, lines: int) -> list[Shard]:
        claimed: list[Shard] = []
        while len(claimed) < lines:
            claim = await self._store.claim(
                owner=_OWNER, lease=_LEASE, lines=lines - len(claimed), bytes=1 << 30, alone=False, at=_now()
            )
            claimed += claim.shards
        return claimed

    async def _record(self, shard: Shard) -> None:
        progress = ShardProgress(n=shard.n, epoch=shard.epoch, settled=b"\x01", completed=1, failed=0, done=True)
        segment = Segment(output_bytes=len(_LINE), error_bytes=0, data=_LINE)
        await self._store.record(shard.batch_id, progress=[progress], segment=segment, at=_now())

    async def _finish(self) -> None:
        finish = await self._store.lease_finalizable(owner=_OWNER, lease=_LEASE, at=_now())
        assert finish is not None
        batch = finish.batch
        file = await self._file(f"results/{batch.id}/{finish.epoch}-output", purpose=BATCH_OUTPUT)
        await self._store.publish(batch.id, epoch=finish.epoch, files=[file], completed=1, failed=0, at=_now())
        await self._store.delete_work(batch.id)

    async def _file(self, key: str, *, purpose: str) -> File:
        await self._objects.put(key, _LINE)
        return File(
            id=ids.file_id(_random.bytes(12)),
            project_id=self._owner.project_id,
            filename="lines.jsonl",
            purpose=purpose,
            bytes=len(_LINE),
            created_at=_now(),
            expires_at=_now() + 30 * DAY,
            is_error=False,
            object_key=key,
        )

    def _batch(self, file: File) -> Batch:
        return Batch(
            id=ids.batch_id(_clock.now(), _random.bytes(10)),
            project_id=self._owner.project_id,
            key_id=self._owner.key_id,
            endpoint=CHAT,
            input_file_id=file.id,
            metadata=b"{}",
            status=BatchStatus.VALIDATING,
            created_at=_now(),
            expires_at=_now() + DAY,
        )


async def _together(steps: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for step in steps:
            group.create_task(step)


def _now() -> int:
    return int(_clock.now())
