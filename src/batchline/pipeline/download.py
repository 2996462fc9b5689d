"""Finds a file by its id and streams it, whole or in part.

A whole file is compared with its checksum. Its last chunk is sent only if its bytes are those that were written. So the
transfer of a damaged file breaks off, and a client never takes it for a good one.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from batchline.domain.checksum import Checksum
from batchline.domain.errors import Damaged, FileDamaged, FileNotFound, ObjectMissing
from batchline.domain.ids import canonical_file_id
from batchline.domain.records import File
from batchline.pipeline.damage import DamageLog
from batchline.ports import Files, Objects, StoreClock


class Download:
    def __init__(self, *, files: Files, objects: Objects, clock: StoreClock, damage_log: DamageLog) -> None:
        self._files = files
        self._objects = objects
        self._clock = clock
        self._damage_log = damage_log

    async def find(self, project_id: str, file_id: str) -> File:
        """Return the file of this project with that id, in its legacy form too. Raises FileNotFound."""
        file = await self._files.file(project_id, canonical_file_id(file_id), at=int(self._clock.due()))
        if file is None:
            raise FileNotFound(file_id)
        return file

    async def open(self, file: File, *, start: int, length: int) -> AsyncGenerator[bytes]:
        """Return a part of a file as chunks, after the first was read.

        Raises FileNotFound if the object is missing, and FileDamaged if the first chunk is all and is damaged. So a
        missing object is a 404, and not a response that breaks off. The chunks raise Damaged in place of the last one.
        """
        chunks = self._verified(file, start, length)
        try:
            first = await anext(chunks, b"")
        except ObjectMissing as error:
            raise FileNotFound(file.id) from error
        except Damaged as error:
            raise FileDamaged(file.id) from error
        return _chain(first, chunks)

    async def _verified(self, file: File, start: int, length: int) -> AsyncGenerator[bytes]:
        """Yield each chunk after the next was read, and the last one only if all bytes are as they were written."""
        read, held = Checksum(), b""
        async with _closing(self._objects.stream(file.object_key, start, length)) as chunks:
            async for chunk in chunks:
                read.update(chunk)
                if held:
                    yield held
                held = chunk
        is_whole = (start, length) == (0, file.bytes)
        if read.bytes != length or (is_whole and file.checksum not in (None, read.value)):
            self._damage_log.report("file", key=file.object_key, offset=start, file_id=file.id)
            raise Damaged(file.object_key)
        yield held


@asynccontextmanager
async def _closing(chunks: AsyncIterator[bytes]) -> AsyncIterator[AsyncIterator[bytes]]:
    try:
        yield chunks
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()


async def _chain(first: bytes, rest: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    async with aclosing(rest):
        yield first
        async for chunk in rest:
            yield chunk
