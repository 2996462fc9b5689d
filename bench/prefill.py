"""Writes completed batches into a store, as a service would have left them, without sending anything."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from batchline.app import migrate_store, open_store
from batchline.app.backends import open_shared_objects
from batchline.cli.new_key import new_key, new_secret
from batchline.domain import ids
from batchline.domain.records import BATCH, BATCH_OUTPUT, Batch, File, NewShard, Owner, Segment, Shard, ShardProgress
from batchline.domain.states import BatchStatus
from batchline.ports import NewBatch, Objects, Store
from batchline.settings import DAY, Settings
from batchline.system import SystemClock, SystemRandom
from bench.lines import CHAT
from bench.services import StorageSettings

_OWNER = "prefill"
_LEASE_SECONDS = 600.0
_CONCURRENCY = 500
"""Batches written at once, which share their commits."""
_LINE = b'{"custom_id":"line-0","response":null}\n'
_ONE_LINE = NewShard(offset=0, length=len(_LINE), lines=1, model="bench")

_random, _clock = SystemRandom(), SystemClock()


def prefill(storage: StorageSettings, batches: int) -> None:
    """Add this many completed batches of one line each, with their files."""
    asyncio.run(_prefill(Settings(**storage), batches))


async def _prefill(settings: Settings, batches: int) -> None:
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    await migrate_store(settings)
    async with open_store(settings) as store, open_shared_objects(settings) as objects:
        owner = await store.create_key(new_key(new_secret(), project="default", organization="default"))
        writer = _BatchWriter(store, objects, owner)
        for first in range(0, batches, _CONCURRENCY):
            await writer.add(min(_CONCURRENCY, batches - first))


class _BatchWriter:
    def __init__(self, store: Store, objects: Objects, owner: Owner) -> None:
        self._store, self._objects, self._owner = store, objects, owner

    async def add(self, count: int) -> None:
        await _gather(self._start() for _ in range(count))
        await _gather(self._record(shard) for shard in await self._claim(count))
        await _gather(self._finish() for _ in range(count))

    async def _start(self) -> None:
        file = await self._file(f"uploads/{_random.bytes(8).hex()}", purpose=BATCH)
        await self._store.begin_upload(file, owner=_OWNER, lease=_LEASE_SECONDS)
        await self._store.finish_upload(file, owner=_OWNER)
        batch = self._batch(file)
        await self._store.begin_batch(
            NewBatch(batch=batch, digest=_random.bytes(16)), owner=_OWNER, lease=_LEASE_SECONDS, since=0
        )
        await self._store.start_batch(
            batch.id, epoch=batch.epoch, shards=[_ONE_LINE], total=1, work_key=f"work/{batch.id}/0", at=_now()
        )
        await self._store.mark_answered(batch.id)

    async def _claim(self, lines: int) -> list[Shard]:
        claimed: list[Shard] = []
        while len(claimed) < lines:
            claim = await self._store.claim(
                owner=_OWNER, lease=_LEASE_SECONDS, lines=lines - len(claimed), bytes=1 << 30, alone=False, at=_now()
            )
            claimed += claim.shards
        return claimed

    async def _record(self, shard: Shard) -> None:
        progress = ShardProgress(
            n=shard.n, epoch=shard.epoch, former=b"\0", settled=b"\x01", completed=1, failed=0, done=True
        )
        segment = Segment(output_bytes=len(_LINE), error_bytes=0, data=_LINE)
        await self._store.record(shard.batch_id, owner=_OWNER, progress=[progress], segment=segment, at=_now())

    async def _finish(self) -> None:
        finish = await self._store.lease_finalizable(owner=_OWNER, lease=_LEASE_SECONDS, at=_now())
        assert finish is not None
        batch = finish.batch
        file = await self._file(f"results/{batch.id}/{finish.epoch}-output", purpose=BATCH_OUTPUT)
        await self._store.publish(
            batch.id, epoch=finish.epoch, owner=_OWNER, files=[file], completed=1, failed=0, at=_now()
        )
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


async def _gather(steps: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for step in steps:
            group.create_task(step)


def _now() -> int:
    return int(_clock.now())
