"""Reads objects for a check, and tells an object that is damaged from an object store that is unavailable."""

from collections.abc import AsyncIterator

from batchline.domain.errors import ObjectMissing, ObjectsDown
from batchline.fsck.findings import Checked
from batchline.ports import Objects


class Unreadable(Exception):
    """An object cannot be read or is not what was written. The text continues a sentence that begins with its key."""


class ObjectReader:
    """Reads objects and counts the bytes. Every call may raise ObjectsDown if the whole object store is unavailable."""

    def __init__(self, objects: Objects, checked: Checked) -> None:
        self._objects, self._checked = objects, checked

    async def read(self, key: str, start: int, length: int) -> bytes:
        """Return a range of an object; fewer bytes if it ends before. Raise Unreadable.

        The range is read in chunks: its length comes from a row, which may be wrong by any factor.
        """
        try:
            data = b"".join([chunk async for chunk in self._objects.stream(key, start, length)])
        except (ObjectMissing, ObjectsDown) as error:
            raise await self._explain(error) from error
        self._checked.add(bytes=len(data))
        return data

    async def lines(self, key: str, length: int) -> AsyncIterator[bytes]:
        """Yield the lines of an object, with their ends, and what follows the last of them. Raise Unreadable.

        At most ``length`` bytes are read, in chunks.
        """
        rest: list[bytes] = []
        try:
            async for chunk in self._objects.stream(key, 0, length):
                self._checked.add(bytes=len(chunk))
                first, *others = chunk.split(b"\n")
                rest.append(first)
                for piece in others:
                    yield b"".join(rest) + b"\n"
                    rest = [piece]
        except (ObjectMissing, ObjectsDown) as error:
            raise await self._explain(error) from error
        if last := b"".join(rest):
            yield last

    async def require_size(self, key: str, size: int) -> None:
        """Raise Unreadable unless an object has so many bytes. At most two bytes are read."""
        found = len(await self.read(key, max(0, size - 1), 2))
        if found != min(size, 1):
            raise Unreadable(f"is {'longer' if found > 1 else 'shorter'} than the {size} bytes that were stored")

    async def _explain(self, error: Exception) -> Unreadable:
        """Return what is wrong with one object. Raise ObjectsDown if nothing can be read."""
        if isinstance(error, ObjectMissing):
            return Unreadable("is missing")
        await self._objects.check()
        return Unreadable(f"cannot be read: {error}")
