"""Sends local files to a bucket, and writes objects to a local file until they are whole.

The bytes of an upload arrive at the pace of its client, and a part of an object has at least 5 MiB. With many slow
clients at once, parts that wait to become full would take any amount of memory; on the disk they take none. Whole
files are sent at the pace of the bucket, a few at a time.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from batchline.objects.bucket_writer import PART_BYTES, BucketWriter
from batchline.objects.scratch import Scratch, disk
from batchline.ports import Threads

CHUNK_BYTES = 256 * 1024
_UNIT_BYTES = 1024 * 1024
_MAX_SENDING_BYTES = 64 * 1024 * 1024
"""The most memory for files that are being sent, over all projects."""
_PARTS_IN_MEMORY = 3
"""Parts of one object in memory at once: one is read, one is offered, one is sent."""


class FileSender:
    """Sends files to a bucket, only so many at once that their parts in memory stay below a limit."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._free_units = asyncio.Semaphore(_MAX_SENDING_BYTES // _UNIT_BYTES)
        self._turn = asyncio.Lock()

    async def send(self, path: Path, writer: BucketWriter) -> None:
        """Write a file to an object and commit it."""
        size = await self._threads.run(partial(_size, path))
        async with self._memory_for(min(size, _PARTS_IN_MEMORY * PART_BYTES)):
            at = 0
            while chunk := await self._threads.run(partial(_read_at, path, at)):
                await writer.write(chunk)
                at += len(chunk)
            await writer.commit()

    @asynccontextmanager
    async def _memory_for(self, size: int) -> AsyncIterator[None]:
        """Wait for that many bytes of memory. The call that waited longest gets them first."""
        units = max(1, -(-size // _UNIT_BYTES))
        taken = 0
        try:
            async with self._turn:
                while taken < units:
                    await self._free_units.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free_units.release()


class SpooledWriter:
    """A Writer for one object, which is a local file until ``commit`` sends it."""

    def __init__(self, writer: BucketWriter, *, sender: FileSender, scratch: Scratch, threads: Threads) -> None:
        self._writer, self._sender, self._scratch, self._threads = writer, sender, scratch, threads
        self._files = AsyncExitStack()
        self._path: Path | None = None
        self._size = 0
        self._closed = False

    async def write(self, data: bytes) -> None:
        path = await self._open()
        await self._threads.run(partial(write_at, path, self._size, data))
        self._size += len(data)

    async def commit(self) -> None:
        path = await self._open()
        self._closed = True
        await self._sender.send(path, self._writer)
        await self._files.aclose()

    async def abort(self) -> None:
        """Discard the object. If a commit was cancelled, wait until it ended."""
        self._closed = True
        try:
            await self._writer.abort()
        finally:
            await self._files.aclose()

    async def _open(self) -> Path:
        if self._closed:
            raise ValueError("This writer is closed")
        if self._path is None:
            self._path = await self._files.enter_async_context(self._scratch.file())
            await self._threads.run(partial(make_file, self._path))
        return self._path


@disk()
def make_file(path: Path) -> None:
    path.touch(exist_ok=False)


# The file is opened for every chunk: a call whose caller was cancelled continues in its thread, so no other code may
# close its file, and it must not create a file again that was removed.
@disk()
def write_at(path: Path, at: int, data: bytes) -> None:
    """Write into a file that exists."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@disk()
def _read_at(path: Path, at: int) -> bytes:
    with path.open("rb") as file:
        file.seek(at)
        return file.read(CHUNK_BYTES)


@disk()
def _size(path: Path) -> int:
    return path.stat().st_size
