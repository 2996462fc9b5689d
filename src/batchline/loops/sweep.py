"""Removes the objects that no row needs, which crashed processes left or late writers wrote.

No object is removed because of its age. There are two cases:

- Its row says that it is not needed: its file was removed, or its batch has ended and its work was deleted. No process
  can commit a row for it any more, so it is removed at once.
- It has no row at all. Every object gets its row before it is written, so either the row was removed with it, or this
  is not the database that the object was written for. The sweep cannot tell which. So it removes the object only if it
  has seen it twice, an hour apart, and if there are few objects like it.
"""

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from batchline.domain.errors import WrongIdentity
from batchline.pipeline.identity import IdentityCheck
from batchline.ports import Clock, Objects, Store
from batchline.telemetry.metrics import Metrics

_PAGE_KEYS = 1000
_PAUSE_BETWEEN_PAGES_SECONDS = 1.0
"""The sweep pauses after each page of objects, because there can be millions of them."""
_SIGHTING_AGE_SECONDS = 3600
"""The time between the first sighting of an object without a row and its removal."""
_FORGET_SECONDS = 7 * 86_400
"""Sightings that were not repeated for this time are forgotten. A service may be stopped for some days."""
_MAX_SIGHTINGS = 50_000
"""The most sightings that are kept. Further objects without a row are held back."""
_MIN_LIMIT = 10
"""The number of objects without a row that a sweep may always remove: in a small service a crash can leave more than
the share."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class _Counts:
    """The counts of one sweep. The objects of one batch in ``work`` or ``segments`` count as one."""

    seen: int = 0
    first_sighted: int = 0
    deleted: int = 0
    held_back: int = 0
    due: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Unneeded:
    """Objects that no row needs: those whose row says so, and those without a row."""

    removed: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


class Sweep:
    """Has one step, which every worker may run at any time.

    ``max_percent`` is the share of all objects that may have no row and be removed. If there are more, none is removed.
    """

    def __init__(
        self,
        *,
        store: Store,
        objects: Objects,
        identity: IdentityCheck,
        clock: Clock,
        metrics: Metrics,
        max_percent: int,
    ) -> None:
        self._store, self._objects, self._identity = store, objects, identity
        self._clock, self._metrics, self._max_percent = clock, metrics, max_percent

    async def step(self) -> bool:
        """Check all objects once, and return False."""
        counts = _Counts()
        try:
            await self._identity.check()
            async for keys in pages_of(self._objects):
                await self._look_at(keys, counts)
                await self._clock.sleep(_PAUSE_BETWEEN_PAGES_SECONDS)
            await self._delete_due(counts)
        except WrongIdentity as error:
            log.error("sweep stopped, no further object will be deleted", extra={"reason": str(error)})  # noqa: TRY400
            return False
        await self._store.forget_unseen(age=_FORGET_SECONDS)
        self._report(counts)
        return False

    async def _look_at(self, keys: list[str], counts: _Counts) -> None:
        unneeded = await find_unneeded(self._store, keys)
        await self._delete(unneeded.removed)
        sighted = await self._store.sight(unneeded.unknown, age=_SIGHTING_AGE_SECONDS, limit=_MAX_SIGHTINGS)
        counts.seen += len(keys)
        counts.first_sighted += sighted.first
        counts.deleted += len(unneeded.removed)
        counts.held_back += sighted.ignored
        counts.due += sighted.due

    async def _delete_due(self, counts: _Counts) -> None:
        """Delete the objects without a row that were seen twice, unless they are too many."""
        if len(counts.due) > self._limit(counts.seen):
            counts.held_back += len(counts.due)
            return
        for at in range(0, len(counts.due), _PAGE_KEYS):
            still_unknown = (await find_unneeded(self._store, counts.due[at : at + _PAGE_KEYS])).unknown
            await self._delete(still_unknown)
            await self._store.forget(still_unknown)
            counts.deleted += len(still_unknown)

    def _limit(self, seen: int) -> int:
        return max(_MIN_LIMIT, seen * self._max_percent // 100) if self._max_percent else 0

    async def _delete(self, keys: Sequence[str]) -> None:
        """Delete objects, after a check that they still belong to this database."""
        if keys:
            await self._identity.check()
        for key in keys:
            if key.startswith(("segments/", "work/")):
                await self._objects.delete_all(key)
            else:
                await self._objects.delete(key)

    def _report(self, counts: _Counts) -> None:
        fields = {
            "seen": counts.seen,
            "first_sighted": counts.first_sighted,
            "deleted": counts.deleted,
            "held_back": counts.held_back,
        }
        self._metrics.sweep_deleted.inc(counts.deleted)
        self._metrics.sweep_held_back.set(counts.held_back)
        if counts.held_back:
            log.warning(
                "sweep held back objects without a row: they are too many. Check that this is the right database. To "
                "delete them, set BATCHLINE_SWEEP_MAX_PERCENT=100",
                extra=fields,
            )
        else:
            log.info("sweep finished", extra=fields)


async def pages_of(objects: Objects) -> AsyncIterator[list[str]]:
    """Yield the keys of uploads and results, and for work files and segments one prefix per batch."""
    for folder in ("segments", "work"):
        names = await objects.names(folder)
        for at in range(0, len(names), _PAGE_KEYS):
            yield [f"{folder}/{name}" for name in names[at : at + _PAGE_KEYS]]
    for folder in ("uploads", "results"):
        async for keys in objects.keys(folder):
            yield keys


async def find_unneeded(store: Store, keys: Sequence[str]) -> Unneeded:
    """Return those of the keys and prefixes that no row needs."""
    # The order matters. If a batch has ended and an object of it has no row after that, it will never have one.
    batches = await store.known_batches(sorted({batch_of(key) for key in keys if not _is_upload(key)}))
    named = await store.known_keys(keys)
    referenced = await store.referenced_keys(keys)
    unneeded = Unneeded()
    for key in keys:
        batch = batches.get(batch_of(key))
        if key in referenced or (batch is not None and (batch.active or (batch.has_work and _is_work(key)))):
            continue
        (unneeded.removed if key in named or batch is not None else unneeded.unknown).append(key)
    return unneeded


def batch_of(key: str) -> str:
    """Return the batch in the key ``results/BATCH/NAME`` or the prefix ``work/BATCH``."""
    return key.split("/")[1]


def _is_upload(key: str) -> bool:
    return key.startswith("uploads/")


def _is_work(key: str) -> bool:
    return key.startswith(("segments/", "work/"))
