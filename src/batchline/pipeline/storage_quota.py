"""Bounds the bytes of the files that one project stores."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from batchline.domain.errors import StorageFull
from batchline.ports import Files


class StorageQuota:
    """The quota of every project; without a limit nothing is asked of the store.

    Inputs and results count. Uploads that are under way in this process count as well; those of other processes count
    once they are stored, so several nodes can exceed the quota by what they receive at the same time. Results are
    never refused.
    """

    def __init__(self, limit: int | None, *, files: Files, max_file_bytes: int) -> None:
        self._limit, self._files = limit, files
        self._max_file_bytes = max_file_bytes
        self._arriving: Counter[str] = Counter()

    async def is_full(self, project_id: str) -> bool:
        """Return whether the project has nothing left."""
        return self._limit is not None and self._limit <= await self._used(project_id)

    @asynccontextmanager
    async def reserve(self, project_id: str, size: int | None) -> AsyncIterator[int | None]:
        """Hold room for an upload until it has ended, and yield how many bytes it may have; None is any number.

        Raise StorageFull if there is no room. If the size is not known, it may be as large as the room that is left.
        """
        if self._limit is None:
            yield None
            return
        left = self._limit - await self._used(project_id)
        if left <= 0 or (size is not None and size > left):
            raise self.full()
        reserved = min(left, self._max_file_bytes) if size is None else size
        self._arriving[project_id] += reserved
        try:
            yield reserved
        finally:
            self._arriving[project_id] -= reserved
            if not self._arriving[project_id]:
                del self._arriving[project_id]

    def full(self) -> StorageFull:
        """Return the error for a project that has no room."""
        return StorageFull(self._limit or 0)

    async def _used(self, project_id: str) -> int:
        return await self._files.stored_bytes(project_id) + self._arriving[project_id]
