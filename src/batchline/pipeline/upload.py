"""Stores an uploaded file: writes its row, then its bytes, then makes both visible at once, or removes both."""

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from batchline.domain import ids
from batchline.domain.errors import InvalidRequest, LeaseLost, ObjectsDown, StorageFailed, StoreDown, TooLarge
from batchline.domain.records import BATCH, File
from batchline.pipeline.lease import renewing
from batchline.ports import Clock, Files, Objects, Random, Writer

log = logging.getLogger(__name__)


class Upload:
    """Begins uploads, and holds the lease of each until it ends."""

    def __init__(
        self,
        *,
        files: Files,
        objects: Objects,
        clock: Clock,
        random: Random,
        owner: str,
        lease_seconds: float,
        retention_seconds: int,
        max_bytes: int,
    ) -> None:
        self._files, self._objects = files, objects
        self._clock, self._random = clock, random
        self._owner, self._lease_seconds = owner, lease_seconds
        self._retention_seconds, self._max_bytes = retention_seconds, max_bytes

    @asynccontextmanager
    async def begin(self, project_id: str) -> AsyncIterator["IncomingFile"]:
        """Begin an upload; the body writes the chunks and then calls ``finish``.

        The lease is renewed in the background. A body that ends in any way without ``finish`` abandons the upload.
        Raises StorageFailed if the store or the objects are unavailable, or if the lease is lost.
        """
        incoming = IncomingFile(
            row=_Row(
                files=self._files,
                file_id=ids.file_id(self._random.bytes(16)),
                project_id=project_id,
                owner=self._owner,
                lease_seconds=self._lease_seconds,
            ),
            objects=self._objects,
            clock=self._clock,
            retention_seconds=self._retention_seconds,
            max_bytes=self._max_bytes,
        )
        try:
            with _storage_errors():
                async with renewing(incoming.renew, every=self._lease_seconds / 3, clock=self._clock):
                    yield incoming
        finally:
            await incoming.close()


class IncomingFile:
    """A file while its bytes arrive."""

    def __init__(self, *, row: "_Row", objects: Objects, clock: Clock, retention_seconds: int, max_bytes: int) -> None:
        self._row = row
        self._objects, self._clock = objects, clock
        self._retention_seconds, self._max_bytes = retention_seconds, max_bytes
        self._writer: Writer | None = None
        self._size = 0
        self._committing = False

    async def write(self, chunk: bytes) -> None:
        """Append a chunk. Raises TooLarge if the file is larger than allowed."""
        if not chunk:
            return
        self._add_size(len(chunk))
        writer = self._writer or await self._open()
        await writer.write(chunk)

    async def accept(self, path: Path, size: int) -> None:
        """Take a file of ``Objects.scratch`` as the whole file. Raises TooLarge if it is larger than allowed."""
        self._add_size(size)
        await self._begin_row()
        self._committing = True
        await self._objects.accept(path, self._row.object_key)

    async def finish(self, *, filename: str | None, expires_after: int | None) -> File:
        """Make the bytes durable and then the file visible, created now. Raises InvalidRequest if it is empty."""
        if not self._size:
            raise InvalidRequest("The uploaded file is empty", code="empty_file", param="file")
        self._committing = True
        if self._writer is not None:
            await self._writer.commit()
            self._writer = None
        file = self._file(filename=filename, lifetime_seconds=expires_after or self._retention_seconds)
        await self._row.finish(file)
        return file

    async def renew(self) -> None:
        await self._row.renew()

    async def close(self) -> None:
        """Remove an unfinished upload. If that fails now, the sweep removes it after its lease has expired."""
        try:
            await self._abandon()
        except (StoreDown, ObjectsDown) as error:
            log.warning(
                "failed to remove an unfinished upload, left for the sweep",
                extra={"file": self._row.file_id, "reason": str(error)},
            )

    def _add_size(self, size: int) -> None:
        self._size += size
        if self._size > self._max_bytes:
            raise TooLarge(f"File exceeds maximum size of {self._max_bytes} bytes", code="file_too_large", param="file")

    async def _begin_row(self) -> None:
        await self._row.begin(self._file(filename=None, lifetime_seconds=self._retention_seconds))

    async def _open(self) -> Writer:
        await self._begin_row()
        self._writer = await self._objects.create(self._row.object_key, spooled=True)
        return self._writer

    async def _abandon(self) -> None:
        try:
            if self._writer is not None:
                await self._writer.abort()
        finally:
            abandoned = await self._row.abandon()
        if abandoned and self._committing:
            await self._objects.delete(self._row.object_key)

    def _file(self, *, filename: str | None, lifetime_seconds: int) -> File:
        now = int(self._clock.now())
        return File(
            id=self._row.file_id,
            project_id=self._row.project_id,
            filename=filename or f"{self._row.file_id}.jsonl",
            purpose=BATCH,
            bytes=self._size,
            created_at=now,
            expires_at=now + lifetime_seconds,
            is_error=False,
            object_key=self._row.object_key,
        )


class _Row:
    """The row of the file, written before the first byte of its object, under a lease of this process."""

    def __init__(self, *, files: Files, file_id: str, project_id: str, owner: str, lease_seconds: float) -> None:
        self.file_id, self.project_id = file_id, project_id
        self.object_key = f"uploads/{file_id}"
        self._files, self._owner, self._lease_seconds = files, owner, lease_seconds
        self._begun = self._finishing = self._finished = False

    async def begin(self, file: File) -> None:
        self._begun = True
        await self._files.begin_upload(file, owner=self._owner, lease=self._lease_seconds)

    async def renew(self) -> None:
        # A lease that ends because the file became visible is not a lost one.
        if self._begun and not self._finishing:
            await self._files.renew_upload(self.file_id, owner=self._owner, lease=self._lease_seconds)

    async def finish(self, file: File) -> None:
        self._finishing = True
        await self._files.finish_upload(file, owner=self._owner)
        self._finished = True

    async def abandon(self) -> bool:
        """Delete the row of an unfinished upload, and return whether no row refers to the object any more.

        A ``finish`` that failed may still have made the file visible.
        """
        if not self._begun or self._finished:
            return False
        await self._files.abandon_upload(self.file_id, owner=self._owner)
        return not await self._files.referenced_keys([self.object_key])


@contextmanager
def _storage_errors() -> Iterator[None]:
    try:
        yield
    except (StoreDown, ObjectsDown, LeaseLost) as error:
        raise StorageFailed from error
