"""Writes an object to a bucket.

A small object is sent in one request at its commit. A larger one is sent part by part as it is written, so that only a
few parts of it are ever in memory. Where many objects are written at once, ``FileSender`` bounds their sum.
"""

import asyncio
from asyncio import Event, Future
from typing import TYPE_CHECKING, cast

import obstore
from obstore.store import S3Store

from batchline.objects.s3_errors import FAULTS, explained

if TYPE_CHECKING:
    from obstore import PutResult

PART_BYTES = 5 * 1024 * 1024
"""The smallest part that S3 accepts, because every upload under way holds up to three parts in memory."""


class BucketWriter:
    """A Writer for one object."""

    def __init__(self, store: S3Store, key: str) -> None:
        self._store, self._key = store, key
        self._buffer = bytearray()
        self._parts: _Parts | None = None
        self._upload: Future[PutResult] | None = None
        self._closed = False

    async def write(self, data: bytes) -> None:
        self._require_open()
        self._buffer += data
        while len(self._buffer) >= PART_BYTES:
            try:
                await self._send_part()
            except BaseException:
                self._closed = True
                raise

    async def commit(self) -> None:
        self._require_open()
        self._closed = True
        rest = bytes(self._buffer)
        self._buffer.clear()
        if self._parts is None:
            self._upload = start_upload(self._store, self._key, rest)
        else:
            await self._parts.offer(rest)
            self._parts.end()
        await self._wait_for_upload()

    async def abort(self) -> None:
        """Discard the upload, which never becomes an object.

        If the store does not get the request to abort, the bucket's lifecycle rule removes the parts.
        """
        self._closed = True
        self._buffer.clear()
        if self._parts is not None:
            self._parts.abort()
        if self._upload is not None:
            # This may also be a commit whose caller was cancelled: a delete that follows must come after it.
            await asyncio.wait([self._upload])

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError("This writer is closed")

    async def _send_part(self) -> None:
        with memoryview(self._buffer) as view:
            part = bytes(view[:PART_BYTES])
        del self._buffer[:PART_BYTES]
        if self._parts is None:
            self._parts = _Parts()
            self._upload = start_upload(self._store, self._key, self._parts)
            self._upload.add_done_callback(self._parts.on_upload_done)
        await self._parts.offer(part)
        if self._upload is not None and self._upload.done():
            await self._wait_for_upload()

    async def _wait_for_upload(self) -> None:
        if self._upload is None:
            return
        try:
            await asyncio.shield(self._upload)
        except FAULTS as fault:
            raise explained(fault, action=f"Writing {self._key}") from None


class _Aborted(Exception):
    """Raised to obstore in place of a part, which makes it abort the upload."""


class _Parts:
    """The parts that obstore reads one after the other. It holds one part until obstore takes it."""

    def __init__(self) -> None:
        self._next = b""
        self._ended = self._aborted = False
        self._taken, self._available = Event(), Event()
        self._taken.set()

    async def offer(self, part: bytes) -> None:
        """Wait until the part before was taken, and offer the next.

        If the upload has failed, return at once: no part is wanted any more.
        """
        await self._taken.wait()
        self._next = part
        self._taken.clear()
        self._available.set()

    def end(self) -> None:
        """Tell obstore that no part follows."""
        self._ended = True
        self._available.set()

    def abort(self) -> None:
        """Make obstore abort the upload at its next read."""
        self._aborted = True
        self._available.set()

    def on_upload_done(self, upload: "Future[PutResult]") -> None:
        """Let a waiting ``offer`` return."""
        self._taken.set()
        if not upload.cancelled():
            # Retrieve the error, so that asyncio does not report it if no caller awaits the upload any more.
            upload.exception()

    def __aiter__(self) -> "_Parts":
        return self

    async def __anext__(self) -> bytes:
        await self._available.wait()
        if self._aborted:
            raise _Aborted
        if not self._next:
            raise StopAsyncIteration
        part, self._next = self._next, b""
        self._taken.set()
        if not self._ended:
            self._available.clear()
        return part


def start_upload(store: S3Store, key: str, content: bytes | _Parts) -> "Future[PutResult]":
    """Start an upload in obstore's own threads."""
    # Obstore declares a coroutine but returns a future of its own threads, which runs at once without being awaited.
    started = obstore.put_async(
        store, key, content, use_multipart=isinstance(content, _Parts), chunk_size=PART_BYTES, max_concurrency=1
    )
    return cast("Future[PutResult]", started)
