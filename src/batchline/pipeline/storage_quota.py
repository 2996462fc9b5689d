"""Bounds the bytes of the files that a project and its organization store."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from batchline.domain.errors import StorageFull
from batchline.domain.limits import StorageLimits
from batchline.domain.records import Owner
from batchline.ports import Files


class Room(NamedTuple):
    """The bytes that are left within a limit, and the error for an upload that needs more."""

    bytes: int
    error: StorageFull


class StorageQuota:
    """The quotas of all projects and organizations. Without a limit the store is not read.

    Inputs and results count. Uploads in progress in this process count as well. Those of other processes count once
    they are stored, so several nodes can exceed a quota by the uploads that they receive at the same time. Results are
    never refused.
    """

    def __init__(self, limits: StorageLimits, *, files: Files, max_file_bytes: int) -> None:
        self._limits, self._files = limits, files
        self._max_file_bytes = max_file_bytes
        self._arriving: Counter[str] = Counter()
        """The bytes of uploads in progress, by the id of their project and of their organization."""

    async def exhausted(self, owner: Owner) -> StorageFull | None:
        """Return the error if the project or its organization has nothing left."""
        room = await self._room(owner)
        return room.error if room is not None and room.bytes <= 0 else None

    @asynccontextmanager
    async def reserve(self, owner: Owner, size: int | None) -> AsyncIterator[Room | None]:
        """Reserve room for an upload until it has ended, and yield the bytes that it may have; None without a limit.

        Raise StorageFull if there is no room. An upload of unknown size may be as large as the room that is left.
        """
        room = await self._room(owner)
        if room is None:
            yield None
            return
        if room.bytes <= 0 or (size is not None and size > room.bytes):
            raise room.error
        reserved = min(room.bytes, self._max_file_bytes) if size is None else size
        held = {owner.project_id: reserved, owner.organization_id: reserved}
        self._arriving += Counter(held)
        try:
            yield Room(reserved, room.error)
        finally:
            self._arriving -= Counter(held)

    async def _room(self, owner: Owner) -> Room | None:
        """Return the smaller of the two rooms that are left, or None if there is no limit."""
        stored: list[tuple[str, str, int, int]] = []
        if limit := self._limits.of_project(owner.project_id):
            used = await self._files.stored_bytes(owner.project_id)
            stored.append(("project", owner.project_id, limit, used))
        if limit := self._limits.of_organization(owner.organization_id):
            used = await self._files.stored_bytes_of_organization(owner.organization_id)
            stored.append(("organization", owner.organization_id, limit, used))
        # Uploads may have begun while the store was read, so they are counted last.
        rooms = [
            Room(limit - used - self._arriving[key], StorageFull(limit, scope=scope))
            for scope, key, limit, used in stored
        ]
        return min(rooms, key=lambda room: room.bytes, default=None)
