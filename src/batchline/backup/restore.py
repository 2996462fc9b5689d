"""Put a backup into backends that hold nothing: objects first, rows last and all at once, so that one that dies
half-way has restored nothing and can be run again."""

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

from batchline.backup.archive import Archive, Entry
from batchline.backup.manifest import Progress, TransferError
from batchline.backup.rows import Marks, needed_since, opened, settle
from batchline.backup.workspace import sync_folder
from batchline.domain.errors import ObjectsDown
from batchline.ports import Clock, Objects, Threads

_FOLDERS = ("uploads", "work", "segments", "results")
_MARKS = "restore"
"""An object below it says that a restore is under way, so that the next one may remove what it finds."""
_AT_ONCE = 8
_AGAIN = "Nothing was restored; the same command may be run again."


class Rows(Protocol):
    """Where rows are kept."""

    async def require_empty(self) -> None:
        """Raises TransferError."""

    async def take(self, database: Path) -> None:
        """All rows of a settled database, or none. Raises TransferError."""


class Restore:
    """``folder`` is on a local disk, and empty."""

    def __init__(
        self, *, rows: Rows, objects: Objects, folder: Path, threads: Threads, clock: Clock, progress: Progress
    ) -> None:
        self._rows, self._objects = rows, objects
        self._database = folder / "batchline.sqlite"
        self._threads, self._clock, self._progress = threads, clock, progress

    async def run(self, archive: Archive) -> None:
        """Raises TransferError."""
        try:
            await self._restore(archive)
        except ObjectsDown as error:
            raise TransferError(f"The objects cannot be written: {error}. {_AGAIN}") from error
        except OSError as error:
            raise TransferError(f"The backup cannot be unpacked: {error}. {_AGAIN}") from error

    async def _restore(self, archive: Archive) -> None:
        await self._rows.require_empty()
        await self._make_room()
        archive.extract_database(self._database)
        settle(self._database, clock=self._clock, threads=self._threads)
        await self._put_objects(archive)
        await self._require_objects(lost=archive.manifest.lost)
        await self._rows.take(self._database)
        await self._objects.delete_all(_MARKS)

    async def _make_room(self) -> None:
        used = [folder for folder in _FOLDERS if await self._objects.names(folder)]
        if used and not await self._objects.names(_MARKS):
            raise TransferError(
                "There are objects already where those of the backup belong. Restore into a folder or a bucket's "
                "prefix that holds none."
            )
        await self._objects.put(f"{_MARKS}/unfinished", b"")
        for folder in used:
            await self._objects.delete_all(folder)

    async def _put_objects(self, archive: Archive) -> None:
        room, done = asyncio.Semaphore(_AT_ONCE), 0

        async def put(entry: Entry) -> None:
            nonlocal done
            try:
                await self._put_object(archive, entry)
            finally:
                room.release()
            done += entry.size
            self._progress(done, archive.manifest.object_bytes)

        try:
            async with asyncio.TaskGroup() as group:
                for entry in archive.objects():
                    await room.acquire()
                    group.create_task(put(entry))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _put_object(self, archive: Archive, entry: Entry) -> None:
        writer, at = await self._objects.create(entry.key), 0
        try:
            while chunk := await self._threads.run(partial(archive.read, entry, at)):
                await writer.write(chunk)
                at += len(chunk)
            await writer.commit()
        except BaseException:
            await writer.abort()
            raise

    async def _require_objects(self, *, lost: Iterable[str]) -> None:
        with opened(self._database) as rows:
            needed, _ = needed_since(rows, Marks())
        by_folder: dict[str, set[str]] = defaultdict(set)
        for key in set(needed).difference(lost):
            folder, _, name = key.rpartition("/")
            by_folder[folder].add(name)
        for folder, names in by_folder.items():
            missing = names.difference(await self._objects.names(folder))
            if missing:
                raise TransferError(f"The object {folder}/{min(missing)} is missing. {_AGAIN}")


_OWN = {"lock", "objects", "scratch", "transfer"}
"""What a folder has that was only prepared, or that a restore which died has left."""


class SqliteRows:
    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir

    async def require_empty(self) -> None:
        found = {entry.name for entry in self._folder.iterdir()} - _OWN
        if found:
            raise TransferError(
                f"The data folder {self._folder} holds {min(found)} already. "
                "Restore into a folder that is empty or not there yet."
            )

    async def take(self, database: Path) -> None:
        _publish(database, self._folder)


def _publish(database: Path, folder: Path) -> None:
    with database.open("rb") as file:
        os.fsync(file.fileno())
    database.replace(folder / "batchline.sqlite")
    sync_folder(folder)
