"""Finds a file by its id and streams it, whole or in part."""

from collections.abc import AsyncGenerator, AsyncIterator

from batchline.domain.errors import FileNotFound, ObjectMissing
from batchline.domain.ids import canonical_file_id
from batchline.domain.records import File
from batchline.ports import Files, Objects, StoreClock


class Download:
    def __init__(self, *, files: Files, objects: Objects, clock: StoreClock) -> None:
        self._files = files
        self._objects = objects
        self._clock = clock

    async def find(self, project_id: str, file_id: str) -> File:
        """Return the file of this project with that id, in its legacy form too. Raises FileNotFound."""
        file = await self._files.file(project_id, canonical_file_id(file_id), at=int(self._clock.due()))
        if file is None:
            raise FileNotFound(file_id)
        return file

    async def open(self, file: File, *, start: int, length: int) -> AsyncGenerator[bytes]:
        """Return a part of a file as chunks, after the first was read. Raises FileNotFound if the object is missing.

        So a missing object is a 404, and not a response that breaks off.
        """
        chunks = self._objects.stream(file.object_key, start, length)
        try:
            first = await anext(chunks, b"")
        except ObjectMissing as error:
            raise FileNotFound(file.id) from error
        return _chain(first, chunks)


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    try:
        yield first
        async for chunk in rest:
            yield chunk
    finally:
        if isinstance(rest, AsyncGenerator):
            await rest.aclose()
