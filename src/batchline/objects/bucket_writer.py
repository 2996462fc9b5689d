"""An object on its way into a bucket. A small one goes in one request at its commit; a larger one part by part, as
it comes, so that only a few parts of it are ever in memory."""

import asyncio
from asyncio import Event, Future
from typing import TYPE_CHECKING, cast

import obstore
from obstore.store import S3Store

from batchline.objects.s3_errors import FAULTS, explained

if TYPE_CHECKING:
    from obstore import PutResult

PART_BYTES = 5 * 1024 * 1024
"""The least that S3 takes as a part, since every upload under way holds up to three."""


class BucketWriter:
    def __init__(self, store: S3Store, key: str) -> None:
        self._store, self._key = store, key
        self._buffer = bytearray()
        self._parts: _Parts | None = None
        self._upload: Future[PutResult] | None = None
        self._over = False

    async def write(self, data: bytes) -> None:
        self._require_open()
        self._buffer += data
        while len(self._buffer) >= PART_BYTES:
            try:
                await self._send_part()
            except BaseException:
                self._over = True
                raise

    async def commit(self) -> None:
        self._require_open()
        self._over = True
        rest = bytes(self._buffer)
        self._buffer.clear()
        if self._parts is None:
            self._upload = start_upload(self._store, self._key, rest)
        else:
            await self._parts.hand(rest)
            self._parts.end()
        await self._settled()

    async def abort(self) -> None:
        """What the store does not hear of now is for the bucket's lifecycle rule; an object it never becomes."""
        self._over = True
        self._buffer.clear()
        if self._parts is not None:
            self._parts.give_up()
        if self._upload is not None:
            # Also when it is a commit whose caller was cancelled: whoever deletes next must come after it.
            await asyncio.wait([self._upload])

    def _require_open(self) -> None:
        if self._over:
            raise ValueError("This writer is over")

    async def _send_part(self) -> None:
        with memoryview(self._buffer) as view:
            part = bytes(view[:PART_BYTES])
        del self._buffer[:PART_BYTES]
        if self._parts is None:
            self._parts = _Parts()
            self._upload = start_upload(self._store, self._key, self._parts)
            self._upload.add_done_callback(self._parts.stop_waiting)
        await self._parts.hand(part)
        if self._upload is not None and self._upload.done():
            await self._settled()

    async def _settled(self) -> None:
        if self._upload is None:
            return
        try:
            await asyncio.shield(self._upload)
        except FAULTS as fault:
            raise explained(fault, activity=f"Writing {self._key}") from None


class _GivenUp(Exception):
    """Told to obstore in place of a part, which makes it abort the upload."""


class _Parts:
    """The parts that obstore asks for, one after the other. The next is taken over when the last one is taken."""

    def __init__(self) -> None:
        self._next = b""
        self._ended = self._given_up = False
        self._room, self._something = Event(), Event()
        self._room.set()

    async def hand(self, part: bytes) -> None:
        """Returns too when the upload has failed and no part is wanted any more."""
        await self._room.wait()
        self._next = part
        self._room.clear()
        self._something.set()

    def end(self) -> None:
        self._ended = True
        self._something.set()

    def give_up(self) -> None:
        self._given_up = True
        self._something.set()

    def stop_waiting(self, upload: "Future[PutResult]") -> None:
        self._room.set()
        if not upload.cancelled():
            # Seen, even if nobody asks any more.
            upload.exception()

    def __aiter__(self) -> "_Parts":
        return self

    async def __anext__(self) -> bytes:
        await self._something.wait()
        if self._given_up:
            raise _GivenUp
        if not self._next:
            raise StopAsyncIteration
        part, self._next = self._next, b""
        self._room.set()
        if not self._ended:
            self._something.clear()
        return part


def start_upload(store: S3Store, key: str, content: bytes | _Parts) -> "Future[PutResult]":
    # Declared as a coroutine, it is a future of obstore's own threads: it runs at once, and needs nobody to await it.
    started = obstore.put_async(
        store, key, content, use_multipart=isinstance(content, _Parts), chunk_size=PART_BYTES, max_concurrency=1
    )
    return cast("Future[PutResult]", started)
