"""Restores a backup into an empty store.

Objects are written first, and all rows at once at the end. So a restore that dies half-way has restored nothing and can
be run again.
"""

import asyncio
import sqlite3
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

from batchline.backup.archive import Archive, Entry
from batchline.backup.manifest import Progress, TransferError
from batchline.backup.rows import Marks, needed_since, opened, prepare_rows, select
from batchline.domain.errors import ObjectsDown
from batchline.domain.identity import ID_BYTES, MARKER_FOLDER, MARKER_TEXT, UNFINISHED_RESTORE_FOLDER, Identity
from batchline.durable import replace, sync_path
from batchline.pipeline.identity import OBJECT_FOLDERS
from batchline.ports import Objects, Random, Threads

_MAX_CONCURRENT_WRITES = 8
_RUN_AGAIN = "Nothing was restored; the same command may be run again."


class TargetDatabase(Protocol):
    """The database that rows are restored into."""

    async def require_empty(self) -> None:
        """Raise TransferError if the database holds anything."""

    async def name_database(self, database: Path, *, database_id: str) -> str:
        """Give the database an id, unless it has one already, and return its id. Raise TransferError.

        ``database`` has the rows that are inserted later.
        """

    async def insert_all(self, database: Path, *, objects_id: str) -> None:
        """Insert all rows of a database without leases, and the id of its objects, or none. Raise TransferError."""


class Restore:
    """Restores one backup. ``folder`` is an empty folder on a local disk."""

    def __init__(
        self,
        *,
        rows: TargetDatabase,
        objects: Objects,
        folder: Path,
        threads: Threads,
        random: Random,
        progress: Progress,
    ) -> None:
        self._rows, self._objects, self._random = rows, objects, random
        self._database = folder / "batchline.sqlite"
        self._threads, self._progress = threads, progress

    async def run(self, archive: Archive) -> None:
        """Restore everything or nothing. Raise TransferError."""
        try:
            await self._restore(archive)
        except ObjectsDown as error:
            raise TransferError(f"The objects cannot be written: {error}. {_RUN_AGAIN}") from error
        except sqlite3.Error as error:
            raise TransferError(f"The database in the backup cannot be used: {error}. {_RUN_AGAIN}") from error
        except OSError as error:
            raise TransferError(f"The backup cannot be unpacked: {error}. {_RUN_AGAIN}") from error

    async def _restore(self, archive: Archive) -> None:
        await self._rows.require_empty()
        archive.extract_database(self._database)
        prepare_rows(self._database)
        new_id, objects_id = self._random.bytes(ID_BYTES).hex(), self._random.bytes(ID_BYTES).hex()
        database_id = await self._rows.name_database(self._database, database_id=new_id)
        identity = Identity(database_id=database_id, objects_id=objects_id)
        await self._make_room(identity)
        await self._put_objects(archive)
        await self._require_objects(lost=archive.manifest.lost)
        await self._objects.put(identity.marker_key, MARKER_TEXT)
        await self._rows.insert_all(self._database, objects_id=objects_id)
        await self._objects.delete_all(UNFINISHED_RESTORE_FOLDER)

    async def _make_room(self, identity: Identity) -> None:
        """Remove what a restore that died left. Raise TransferError if there is anything else."""
        used = [folder for folder in OBJECT_FOLDERS if await self._objects.names(folder)]
        if not await self._objects.names(UNFINISHED_RESTORE_FOLDER):
            if used:
                raise TransferError(
                    "There are objects already in the place of those of the backup. Restore into a folder or a "
                    "bucket's prefix that holds none."
                )
            await self._refuse_foreign(identity)
        await self._objects.put(f"{UNFINISHED_RESTORE_FOLDER}/unfinished", b"")
        for folder in (*used, MARKER_FOLDER):
            await self._objects.delete_all(folder)

    async def _refuse_foreign(self, identity: Identity) -> None:
        """Raise TransferError if the place of the objects belongs to another database than the one restored into."""
        if foreign := identity.foreign(await self._objects.names(MARKER_FOLDER)):
            raise TransferError(
                f"The place of the objects belongs to another database, with the id {foreign[0]}: there is a marker "
                f"below {MARKER_FOLDER}/. Restore into a folder or a bucket's prefix that no service uses. If that "
                f"service does not exist any more, delete what is below {MARKER_FOLDER}/."
            )

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

    async def name_database(self, database: Path, *, database_id: str) -> str:
        """Store the new id among the rows, which have none."""
        with opened(database) as rows:
            select(rows, "name_database", database_id=database_id)
        return database_id

    async def insert_all(self, database: Path, *, objects_id: str) -> None:
        """Move the database into the data folder, durably."""
        with opened(database) as rows:
            select(rows, "bind_objects", objects_id=objects_id)
        sync_path(database)
        replace(database, self._folder / "batchline.sqlite")
