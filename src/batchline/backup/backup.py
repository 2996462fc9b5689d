"""Takes a backup of SQLite and a data folder, also while a service uses them.

Objects never change, but they are deleted: first the row or the batch that needs them ends, then the object is deleted.
So the backup blocks commits for a moment. In that moment every object that a row needs exists; each gets a hard link in
the backup's own folder, and the rows are frozen as a snapshot. Objects that existed earlier are linked before that, so
the moment is short. Everything that takes long happens after it.
"""

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from batchline import __version__
from batchline.backup.archive import ArchiveWriter
from batchline.backup.manifest import Manifest, Progress, TransferError
from batchline.backup.rows import Marks, needed_since, opened, select
from batchline.backup.workspace import workspace
from batchline.domain.errors import StoreDown
from batchline.durable import replace, sync
from batchline.objects.keys import components
from batchline.ports import Clock
from batchline.store.sqlite.database import require_own_version

_MAX_LINKS_WHILE_BLOCKED = 64
"""The number of new objects that can be linked while the service waits to commit."""
_MAX_LINK_ROUNDS = 10
_PAGES_PER_STEP = 4096


def back_up(data_dir: Path, target: Path, *, overwrite: bool, clock: Clock, progress: Progress) -> Manifest:
    """Write ``target``, whole and on the disk, or nothing. Raise TransferError."""
    database = data_dir / "batchline.sqlite"
    if not database.is_file():
        raise TransferError(f"There is no service in the data folder {data_dir}. Name another with --data-dir.")
    if target.exists() and not overwrite:
        raise TransferError(f"{target} exists already. Name another file, or overwrite it with --force.")
    try:
        with workspace(data_dir) as folder:
            staging = _Staging(data_dir / "objects", folder)
            staging.freeze(database)
            return _write(staging, target, taken_at=int(clock.now()), progress=progress)
    except (sqlite3.Error, StoreDown) as error:
        raise TransferError(f"The database {database} cannot be read: {error}") from error
    except OSError as error:
        raise TransferError(f"The backup cannot be written: {error}") from error


class _Staging:
    """A copy of rows and objects as they were at one moment."""

    def __init__(self, objects: Path, folder: Path) -> None:
        self._objects, self._kept = objects, folder / "objects"
        self._linked: set[str] = set()
        self.database = folder / "batchline.sqlite"

    def freeze(self, database: Path) -> None:
        """Link every object that the rows need, and copy the rows. Raise StoreDown if they are of another version."""
        with opened(database) as reader, opened(database) as writer:
            require_own_version(reader)
            marks = self._link_ahead(reader)
            with _nothing_committed(writer):
                reader.execute("BEGIN")
                self._link_needed(reader, marks)
            self._copy(reader)
            reader.execute("ROLLBACK")

    def path(self, key: str) -> Path:
        """Return the path of an object's link."""
        return self._kept.joinpath(*components(key))

    def _link_ahead(self, reader: sqlite3.Connection) -> Marks:
        """Link objects while the service goes on, until few new ones are left."""
        marks = Marks()
        for _ in range(_MAX_LINK_ROUNDS):
            reader.execute("BEGIN")
            try:
                linked, marks = self._link_needed(reader, marks)
            finally:
                reader.execute("ROLLBACK")
            if linked <= _MAX_LINKS_WHILE_BLOCKED:
                break
        return marks

    def _link_needed(self, reader: sqlite3.Connection, marks: Marks) -> tuple[int, Marks]:
        keys, marks = needed_since(reader, marks)
        return sum(self._link(key) for key in keys), marks

    def _link(self, key: str) -> bool:
        """Link an object and return True, or False if it was linked before or does not exist.

        An object that does not exist is not needed any more, or was lost earlier.
        """
        if key in self._linked:
            return False
        source, kept = self._objects.joinpath(*components(key)), self.path(key)
        kept.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError, NotADirectoryError):
            _link_or_copy(source, kept)
            self._linked.add(key)
        return key in self._linked

    def _copy(self, reader: sqlite3.Connection) -> None:
        """Copy the reader's snapshot, which stays the same however long that takes."""
        with opened(self.database) as copy:
            reader.backup(copy, pages=_PAGES_PER_STEP)
            # A single file, without a write-ahead log beside it.
            copy.execute("PRAGMA journal_mode = DELETE")


def _write(staging: _Staging, target: Path, *, taken_at: int, progress: Progress) -> Manifest:
    with opened(staging.database) as rows:
        needed, _ = needed_since(rows, Marks())
        counts = dict(select(rows, "counts").fetchone())
    sizes = {key: path.stat().st_size for key in needed if (path := staging.path(key)).is_file()}
    manifest = Manifest(
        version=__version__,
        taken_at=taken_at,
        **counts,
        objects=len(sizes),
        object_bytes=sum(sizes.values()),
        lost=sorted(set(needed) - sizes.keys()),
    )
    total = _Total(manifest.object_bytes + staging.database.stat().st_size, progress)
    with _written(target) as file:
        archive = ArchiveWriter(file, manifest, on_write=total.add)
        archive.add_database(staging.database)
        for key in sizes:
            archive.add_object(key, staging.path(key))
        archive.seal()
    return manifest


class _Total:
    """Counts the bytes written and reports them."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = 0, total, progress

    def add(self, count: int) -> None:
        self._done = min(self._total, self._done + count)
        self._progress(self._done, self._total)


@contextmanager
def _nothing_committed(writer: sqlite3.Connection) -> Iterator[None]:
    """Block commits. A service that wants to commit waits for its busy timeout before it reports an error."""
    writer.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        writer.execute("ROLLBACK")


@contextmanager
def _written(target: Path) -> Iterator[IO[bytes]]:
    """Open a file that gets its name once it is whole and on the disk.

    Only its owner may read it, because it holds the data of all tenants.
    """
    partial = target.with_name(f"{target.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
            file.flush()
            sync(file.fileno())
        replace(partial, target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:
        # The object is on another file system, or the file system has no hard links.
        shutil.copyfile(source, target)
