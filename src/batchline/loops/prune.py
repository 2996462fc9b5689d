"""Removes objects that are no longer needed by their rows: expired files, and the work of batches that have ended.

The work of a batch is kept for a while after its end. So if the database is put back to an earlier state, in which the
batch still ran, the batch can go on.
"""

import logging

from batchline.domain.errors import ObjectsDown, StoreDown
from batchline.pipeline.identity import IdentityCheck
from batchline.ports import Clock, Objects, Store

_MAX_PER_STEP = 100
_MAX_FAILURES_PER_STEP = 5
"""After this number of batches that could not be pruned, the step ends: the whole object store may be unavailable, and
each call to it may take 15 s. The next step leaves these batches out."""
_FIRST_RETRY_SECONDS = 60.0
_MAX_RETRY_SECONDS = 3600.0

log = logging.getLogger(__name__)


class Prune:
    """Has one step, which every worker may run at any time."""

    def __init__(
        self,
        *,
        store: Store,
        objects: Objects,
        identity: IdentityCheck,
        clock: Clock,
        owner: str,
        work_retention_seconds: int,
    ) -> None:
        self._store, self._objects, self._identity = store, objects, identity
        self._clock, self._owner = clock, owner
        self._work_retention_seconds = work_retention_seconds
        self._backoff = _Backoff(clock)

    async def step(self) -> bool:
        """Remove expired files and the work of ended batches, and return whether there may be more."""
        await self._identity.check()
        files = await self._store.expire_files(owner=self._owner, limit=_MAX_PER_STEP)
        for key in files:
            await self._delete_file(key)
        batches = await self._store.prunable(
            retention=self._work_retention_seconds,
            without=self._backoff.waiting(),
            limit=_MAX_PER_STEP,
        )
        pruned = await self._prune_batches(batches)
        return len(files) >= _MAX_PER_STEP or pruned >= _MAX_PER_STEP

    async def _delete_file(self, key: str) -> None:
        try:
            await self._objects.delete(key)
        except ObjectsDown as error:
            fields = {"object": key, "reason": str(error)}
            log.warning("failed to delete an expired file, leaving it to the sweep", extra=fields)

    async def _prune_batches(self, batch_ids: list[str]) -> int:
        """Prune batches until too many of them failed, and return the number that were pruned."""
        pruned = failed = 0
        for batch_id in batch_ids:
            if failed == _MAX_FAILURES_PER_STEP:
                break
            if await self._try_to_prune(batch_id):
                pruned += 1
            else:
                failed += 1
        return pruned

    async def _try_to_prune(self, batch_id: str) -> bool:
        """Prune a batch. If that fails, return False, and leave the batch alone for a while."""
        try:
            await self._prune_batch(batch_id)
        except StoreDown:
            raise
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one batch, the others go on
            retry_in = self._backoff.fail(batch_id)
            fields = {"batch": batch_id, "reason": repr(error), "retry_in": retry_in}
            log.warning("failed to delete the work of a batch, going on with the others", extra=fields)
            return False
        self._backoff.succeed(batch_id)
        return True

    async def _prune_batch(self, batch_id: str) -> None:
        await self._objects.delete_all(f"segments/{batch_id}")
        await self._objects.delete_all(f"work/{batch_id}")
        async for keys in self._objects.keys(f"results/{batch_id}"):
            await self._delete_unreferenced(keys)
        await self._store.delete_work(batch_id)

    async def _delete_unreferenced(self, keys: list[str]) -> None:
        referenced = await self._store.referenced_keys(keys)
        for key in keys:
            if key not in referenced:
                await self._objects.delete(key)


class _Backoff:
    """The batches that could not be pruned, with the time of the next try of each, later after each failure."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._delays: dict[str, float] = {}
        self._retry_at: dict[str, float] = {}

    def fail(self, batch_id: str) -> float:
        """Record a failure and return the seconds until the next try."""
        delay = min(2 * self._delays.get(batch_id, _FIRST_RETRY_SECONDS / 2), _MAX_RETRY_SECONDS)
        self._delays[batch_id] = delay
        self._retry_at[batch_id] = self._clock.steady() + delay
        return delay

    def succeed(self, batch_id: str) -> None:
        """Forget a batch that was pruned."""
        self._delays.pop(batch_id, None)
        self._retry_at.pop(batch_id, None)

    def waiting(self) -> list[str]:
        """Return the batches whose next try is not due yet."""
        now = self._clock.steady()
        return [batch_id for batch_id, retry_at in self._retry_at.items() if retry_at > now]
