"""Remove what is over: the work of finished batches, expired files, and objects that no row stands for.

Nothing is judged by its age. An object goes when its row says so, or when the row it would need can no longer be
committed by anyone.
"""

from batchline.ports import Clock, Objects, Store

_AT_ONCE = 100
_BREATH_SECONDS = 1.0
"""Between two looks at many objects, of which there can be millions."""


class Prune:
    def __init__(self, *, store: Store, objects: Objects, clock: Clock, owner: str) -> None:
        self._store, self._objects, self._clock, self._owner = store, objects, clock, owner

    async def step(self) -> bool:
        files = await self._store.expire_files(owner=self._owner, at=int(self._clock.now()), limit=_AT_ONCE)
        for key in files:
            await self._objects.delete(key)
        batches = await self._store.prunable(limit=_AT_ONCE)
        for batch_id in batches:
            await self._objects.delete_all(f"segments/{batch_id}")
            await self._objects.delete_all(f"work/{batch_id}")
            async for keys in self._objects.keys(f"results/{batch_id}"):
                await self._delete_unkept(keys)
            await self._store.delete_work(batch_id)
        return len(files) >= _AT_ONCE or len(batches) >= _AT_ONCE

    async def sweep(self) -> bool:
        """The slow second look: objects of processes that died between two steps, or came back too late."""
        for folder in ("segments", "work"):
            await self._delete_works(folder)
        async for keys in self._objects.keys("uploads"):
            await self._delete_unkept(keys)
            await self._clock.sleep(_BREATH_SECONDS)
        async for keys in self._objects.keys("results"):
            await self._delete_results(keys)
            await self._clock.sleep(_BREATH_SECONDS)
        return False

    async def _delete_works(self, folder: str) -> None:
        found = await self._objects.names(folder)
        running = await self._store.active(found)
        for batch_id in found:
            if batch_id not in running:
                await self._objects.delete_all(f"{folder}/{batch_id}")

    async def _delete_results(self, keys: list[str]) -> None:
        # First who is running: what a batch that is over has no row for will never have one.
        running = await self._store.active(list({_batch_of(key) for key in keys}))
        await self._delete_unkept([key for key in keys if _batch_of(key) not in running])

    async def _delete_unkept(self, keys: list[str]) -> None:
        kept = await self._store.referenced_keys(keys)
        for key in keys:
            if key not in kept:
                await self._objects.delete(key)


def _batch_of(key: str) -> str:
    """Of ``results/BATCH/NAME``."""
    return key.split("/")[1]
