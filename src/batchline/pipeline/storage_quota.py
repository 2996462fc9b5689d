"""Bounds the bytes of the files that a project and its organization store."""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import NamedTuple

from batchline.domain.errors import StorageFull
from batchline.domain.limits import StorageLimits
from batchline.domain.records import Owner
from batchline.ports import Files

_STEP_BYTES = 1024 * 1024
"""The bytes by which an upload of unknown size reserves room while it arrives. Each step reads the store."""


class _Room(NamedTuple):
    """The bytes that are left within a limit, and the error for an upload that needs more."""

    bytes: int
    released: int
    """The bytes of uploads that ended during the read of the store. They count as used, perhaps twice."""
    error: StorageFull


class _Reading:
    """A read of the stored sums, and the bytes of the uploads that have ended since it began."""

    def __init__(self) -> None:
        self.released: Counter[str] = Counter()


class StorageQuota:
    """The quotas of all projects and organizations. Without a limit the store is not read.

    Inputs and results count. Uploads in progress in this process count as well, those of unknown size by what has
    arrived. Those of other processes count once they are stored, so several nodes can exceed a quota by the uploads
    that they receive at the same time. Results are never refused.
    """

    def __init__(self, limits: StorageLimits, *, files: Files) -> None:
        self._limits, self._files = limits, files
        self._arriving: Counter[str] = Counter()
        """The bytes of uploads in progress, by the id of their project and of their organization."""
        self._readings: set[_Reading] = set()

    async def exhausted(self, owner: Owner) -> StorageFull | None:
        """Return the error if the project or its organization has nothing left."""
        room = await self._room(owner, 1)
        return room.error if room is not None and room.bytes <= 0 else None

    @asynccontextmanager
    async def reserve(self, owner: Owner, size: int | None) -> AsyncIterator["UploadReservation"]:
        """Reserve room for an upload until it has ended. Raise StorageFull if there is none.

        An upload of unknown size calls ``cover`` while it arrives. If it reserved all that is left, every other upload
        and every create would be refused meanwhile, however small it turns out to be.
        """
        reservation = UploadReservation(partial(self._hold, owner))
        try:
            if size is None:
                await reservation.cover(1)
            else:
                reservation.bytes = await self._hold(owner, size, size)
            yield reservation
        finally:
            self._release(_held(owner, reservation.bytes))

    def _release(self, held: Counter[str]) -> None:
        """Count bytes as arriving no longer. A read that has begun may have missed them in the store."""
        self._arriving -= held
        for reading in self._readings:
            reading.released += held

    async def _hold(self, owner: Owner, least: int, most: int) -> int:
        """Count up to ``most`` bytes as arriving, and return how many. Raise StorageFull if ``least`` do not fit."""
        room = await self._room(owner, least)
        if room is not None and (room.bytes <= 0 or least > room.bytes):
            raise room.error
        size = most if room is None else min(most, room.bytes)
        self._arriving += _held(owner, size)
        return size

    async def _room(self, owner: Owner, least: int) -> _Room | None:
        """Return the smaller of the two rooms that are left, or None if there is no limit.

        The store is read again if it is not certain whether ``least`` bytes fit.
        """
        while True:
            room = await self._read_room(owner)
            if room is None or room.bytes >= least or room.bytes + room.released < least:
                return room

    async def _read_room(self, owner: Owner) -> _Room | None:
        """Read the stored sums, and return the smaller room."""
        stored: list[tuple[str, str, int, int]] = []
        with self._reading() as reading:
            if limit := self._limits.of_project(owner.project_id):
                used = await self._files.stored_bytes(owner.project_id)
                stored.append(("project", owner.project_id, limit, used))
            if limit := self._limits.of_organization(owner.organization_id):
                used = await self._files.stored_bytes_of_organization(owner.organization_id)
                stored.append(("organization", owner.organization_id, limit, used))
        # Uploads may have begun or ended while the store was read, so they are counted last.
        rooms = [
            _Room(
                limit - used - self._arriving[key] - reading.released[key],
                reading.released[key],
                StorageFull(limit, scope=scope),
            )
            for scope, key, limit, used in stored
        ]
        return min(rooms, key=lambda room: room.bytes, default=None)

    @contextmanager
    def _reading(self) -> Iterator[_Reading]:
        """Collect the bytes of the uploads that end during a read of the store."""
        reading = _Reading()
        self._readings.add(reading)
        try:
            yield reading
        finally:
            self._readings.remove(reading)


class UploadReservation:
    """The room that one upload holds. ``hold`` is ``StorageQuota._hold`` for its owner."""

    def __init__(self, hold: Callable[[int, int], Awaitable[int]]) -> None:
        self._hold = hold
        self.bytes = 0

    async def cover(self, size: int) -> None:
        """Hold room for the first ``size`` bytes of the upload. Raise StorageFull if they do not fit."""
        missing = size - self.bytes
        if missing > 0:
            self.bytes += await self._hold(missing, max(missing, _STEP_BYTES))


def _held(owner: Owner, size: int) -> Counter[str]:
    return Counter({owner.project_id: size, owner.organization_id: size})
