"""Removes what is no longer needed: the segments and work files of ended batches, expired files, and stray objects.

No object is removed because of its age. It is removed when its row says so, or when no process can commit a row for it
any more.
"""

from batchline.ports import Clock, Objects, Store

_MAX_PER_STEP = 100
_PAUSE_BETWEEN_PAGES_SECONDS = 1.0
"""The sweep pauses after each page of objects, because there can be millions of them."""


class Prune:
    """Has two tasks: ``step`` removes what the store lists, and ``sweep`` looks for objects without a row."""

    def __init__(self, *, store: Store, objects: Objects, clock: Clock, owner: str) -> None:
        self._store, self._objects, self._clock, self._owner = store, objects, clock, owner

    async def step(self) -> bool:
        """Remove expired files and what ended batches no longer need, and return whether there may be more."""
        files = await self._store.expire_files(owner=self._owner, limit=_MAX_PER_STEP)
        for key in files:
            await self._objects.delete(key)
        batches = await self._store.prunable(limit=_MAX_PER_STEP)
        for batch_id in batches:
            await self._objects.delete_all(f"segments/{batch_id}")
            await self._objects.delete_all(f"work/{batch_id}")
            async for keys in self._objects.keys(f"results/{batch_id}"):
                await self._delete_unreferenced(keys)
            await self._store.delete_work(batch_id)
        return len(files) >= _MAX_PER_STEP or len(batches) >= _MAX_PER_STEP

    async def sweep(self) -> bool:
        """Remove objects without a row, of processes that died between two writes or wrote after losing a lease."""
        for folder in ("segments", "work"):
            await self._delete_of_ended_batches(folder)
        async for keys in self._objects.keys("uploads"):
            await self._delete_unreferenced(keys)
            await self._clock.sleep(_PAUSE_BETWEEN_PAGES_SECONDS)
        async for keys in self._objects.keys("results"):
            await self._delete_results(keys)
            await self._clock.sleep(_PAUSE_BETWEEN_PAGES_SECONDS)
        return False

    async def _delete_of_ended_batches(self, folder: str) -> None:
        batch_ids = await self._objects.names(folder)
        active = await self._store.active(batch_ids)
        for batch_id in batch_ids:
            if batch_id not in active:
                await self._objects.delete_all(f"{folder}/{batch_id}")

    async def _delete_results(self, keys: list[str]) -> None:
        # The order matters. If a batch has ended and an object of it has no row after that, it will never have one.
        active = await self._store.active(list({_batch_of(key) for key in keys}))
        await self._delete_unreferenced([key for key in keys if _batch_of(key) not in active])

    async def _delete_unreferenced(self, keys: list[str]) -> None:
        referenced = await self._store.referenced_keys(keys)
        for key in keys:
            if key not in referenced:
                await self._objects.delete(key)


def _batch_of(key: str) -> str:
    """Return the batch in the key ``results/BATCH/NAME``."""
    return key.split("/")[1]
