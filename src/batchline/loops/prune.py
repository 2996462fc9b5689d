"""Remove what is over: the work of finished batches, expired files, and objects that no row stands for.

Nothing is judged by its age. An object goes when its row says so, or when the row it would need can no longer be
committed by anyone.
"""

from batchline.ports import Clock, Objects, Store

_AT_ONCE = 100


class Prune:
    def __init__(self, *, store: Store, objects: Objects, clock: Clock, owner: str) -> None:
        self._store, self._objects, self._clock, self._owner = store, objects, clock, owner

    async def step(self) -> bool:
        files = await self._store.lapse_files(owner=self._owner, at=int(self._clock.now()), limit=_AT_ONCE)
        for key in files:
            await self._objects.delete(key)
        batches = await self._store.finished(limit=_AT_ONCE)
        for batch_id in batches:
            await self._objects.delete_all(f"segments/{batch_id}")
            await self._objects.delete_all(f"work/{batch_id}")
            await self._delete_unkept(f"results/{batch_id}")
            await self._store.forget_work(batch_id)
        return len(files) >= _AT_ONCE or len(batches) >= _AT_ONCE

    async def sweep(self) -> bool:
        """The slow second look: objects of processes that died between two steps, or came back too late."""
        await self._delete_unkept("uploads")
        for folder in ("segments", "work", "results"):
            for batch_id in await self._objects.names(folder):
                if not await self._store.is_running(batch_id):
                    await self._delete_leftovers(folder, batch_id)
        return False

    async def _delete_leftovers(self, folder: str, batch_id: str) -> None:
        if folder == "results":
            await self._delete_unkept(f"results/{batch_id}")
        else:
            await self._objects.delete_all(f"{folder}/{batch_id}")

    async def _delete_unkept(self, prefix: str) -> None:
        for name in await self._objects.names(prefix):
            if not await self._store.is_kept(f"{prefix}/{name}"):
                await self._objects.delete(f"{prefix}/{name}")
