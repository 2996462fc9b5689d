"""The way out of a file: found by its id, streamed whole or in part."""

from collections.abc import AsyncGenerator, AsyncIterator

from batchline.domain.errors import FileNotFound, ObjectMissing
from batchline.domain.ids import canonical_file_id
from batchline.domain.records import File
from batchline.ports import Clock, Files, Objects


class Download:
    def __init__(self, *, files: Files, objects: Objects, clock: Clock) -> None:
        self._files = files
        self._objects = objects
        self._clock = clock

    async def find(self, project_id: str, file_id: str) -> File:
        """The file of this project with that id, under its legacy name too. Raises FileNotFound."""
        file = await self._files.file(project_id, canonical_file_id(file_id), at=int(self._clock.now()))
        if file is None:
            raise FileNotFound(file_id)
        return file

    async def open(self, file: File, *, start: int, length: int) -> AsyncGenerator[bytes]:
        """The bytes of a part, once the first of them could be read: a file that is gone raises FileNotFound here."""
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
