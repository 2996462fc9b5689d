"""Restores a backup into an empty store.

Objects are written first, and all rows at once at the end. So a restore that dies half-way has restored nothing and can
be run again.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

from batchline.backup.archive import Archive, Entry
from batchline.backup.manifest import Progress, TransferError
from batchline.backup.rows import Marks, end_leases, needed_since, opened
from batchline.domain.errors import ObjectsDown
from batchline.durable import replace, sync_path
from batchline.ports import Objects, StoreClock, Threads

_FOLDERS = ("uploads", "work", "segments", "results")
_MARKER_PREFIX = "restore"
"""An object below this prefix says that a restore was begun, so that the next one may remove the objects it finds."""
_MAX_CONCURRENT_WRITES = 8
_RUN_AGAIN = "Nothing was restored; the same command may be run again."


class Rows(Protocol):
    """The database that rows are restored into."""

    async def require_empty(self) -> None:
        """Raise TransferError if the database holds anything."""

    async def insert_all(self, database: Path) -> None:
        """Insert all rows of a database without leases, or none. Raise TransferError."""


class Restore:
    """Restores one backup. ``folder`` is an empty folder on a local disk."""

    def __init__(
        self, *, rows: Rows, objects: Objects, folder: Path, threads: Threads, clock: StoreClock, progress: Progress
    ) -> None:
        self._rows, self._objects = rows, objects
        self._database = folder / "batchline.sqlite"
        self._threads, self._clock, self._progress = threads, clock, progress

    async def run(self, archive: Archive) -> None:
        """Restore everything or nothing. Raise TransferError."""
        try:
            await self._restore(archive)
        except ObjectsDown as error:
            raise TransferError(f"The objects cannot be written: {error}. {_RUN_AGAIN}") from error
        except OSError as error:
            raise TransferError(f"The backup cannot be unpacked: {error}. {_RUN_AGAIN}") from error

    async def _restore(self, archive: Archive) -> None:
        await self._rows.require_empty()
        await self._make_room()
        archive.extract_database(self._database)
        end_leases(self._database, clock=self._clock, threads=self._threads)
        await self._put_objects(archive)
        await self._require_objects(lost=archive.manifest.lost)
        await self._rows.insert_all(self._database)
        await self._objects.delete_all(_MARKER_PREFIX)

    async def _make_room(self) -> None:
        used = [folder for folder in _FOLDERS if await self._objects.names(folder)]
        if used and not await self._objects.names(_MARKER_PREFIX):
            raise TransferError(
                "There are objects already in the place of those of the backup. Restore into a folder or a bucket's "
                "prefix that holds none."
            )
        await self._objects.put(f"{_MARKER_PREFIX}/unfinished", b"")
        for folder in used:
            await self._objects.delete_all(folder)

    async def _put_objects(self, archive: Archive) -> None:
        slots, done = asyncio.Semaphore(_MAX_CONCURRENT_WRITES), 0

        async def put(entry: Entry) -> None:
            nonlocal done
            try:
                await self._put_object(archive, entry)
            finally:
                slots.release()
            done += entry.size
            self._progress(done, archive.manifest.object_bytes)

        try:
            async with asyncio.TaskGroup() as group:
                for entry in archive.objects():
                    await slots.acquire()
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
                raise TransferError(f"The object {folder}/{min(missing)} is missing. {_RUN_AGAIN}")


_IGNORED_ENTRIES = {"lock", "objects", "scratch", "transfer"}
"""The entries of a data folder that was only prepared, or that a restore which died left behind."""


class SqliteRows:
    """Restores rows as the SQLite database of a data folder."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir

    async def require_empty(self) -> None:
        """Raise TransferError if the data folder holds a service's files."""
        found = {entry.name for entry in self._folder.iterdir()} - _IGNORED_ENTRIES
        if found:
            raise TransferError(
                f"The data folder {self._folder} holds {min(found)} already. "
                "Restore into a folder that is empty or does not exist yet."
            )

    async def insert_all(self, database: Path) -> None:
        """Move the database into the data folder, durably."""
        sync_path(database)
        replace(database, self._folder / "batchline.sqlite")
