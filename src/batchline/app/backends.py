"""Opens the store and the objects that the settings name: SQLite and a folder, or PostgreSQL and a bucket."""

import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from batchline.app.startup import StartupError, folder_lock, make_folder, own_folder
from batchline.backup.archive import Archive
from batchline.backup.manifest import Progress
from batchline.backup.postgres import PostgresRows
from batchline.backup.restore import Restore, Rows, SqliteRows
from batchline.backup.workspace import clear_workspace, workspace
from batchline.domain.errors import ObjectsDown, StoreDown, WrongIdentity
from batchline.objects.bucket import BucketObjects
from batchline.objects.local import LocalObjects
from batchline.pipeline.identity import IdentityCheck, refuse_lost_database
from batchline.ports import Objects, Store
from batchline.settings import Settings
from batchline.store.postgres.database import PostgresDatabase
from batchline.store.postgres.migrate import migrate
from batchline.store.sqlite.database import SqliteDatabase
from batchline.store.store import SqlStore
from batchline.system import SystemClock, SystemRandom, ThreadPool

_MAX_CONNECTIONS = 8
_DISK_THREADS = 4
_POSTGRES_PORT = 5432


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Store]:
    """Open the store. A service may be running on it. Raise StartupError."""
    url = settings.database_url
    async with _sqlite(settings) if url is None else _postgres(url, pooled=settings.database_pooler) as store:
        yield store


async def migrate_store(settings: Settings) -> str:
    """Bring the schema up to date and return the name of the database for a message. Raise StartupError."""
    if settings.database_url is None:
        async with _sqlite(settings):
            return f"the database in {settings.data_dir}"
    try:
        await migrate(settings.database_url.get_secret_value())
    except StoreDown as error:
        raise StartupError(f"BATCHLINE_DATABASE_URL cannot be used: {error}") from error
    return "the PostgreSQL database"


async def restore_backup(settings: Settings, archive: Archive, progress: Progress) -> None:
    """Restore a backup into the store that the settings name. It must be empty and unused.

    Raise StartupError or TransferError.
    """
    make_folder(settings.data_dir)
    url, threads = settings.database_url, ThreadPool(_DISK_THREADS, name="restore")
    with folder_lock(settings.data_dir), workspace(settings.data_dir) as folder:
        rows: Rows = SqliteRows(settings.data_dir)
        if url is not None:
            await migrate_store(settings)
            rows = PostgresRows(url.get_secret_value(), pooled=settings.database_pooler)
        async with open_objects(settings) as objects:
            restore = Restore(
                rows=rows,
                objects=objects,
                folder=folder,
                threads=threads,
                clock=SystemClock(),
                random=SystemRandom(),
                progress=progress,
            )
            await restore.run(archive)
    threads.close()


@asynccontextmanager
async def open_both(settings: Settings) -> AsyncIterator[tuple[Store, Objects]]:
    """Open the store and the objects of a process that starts, after a check that both belong together.

    The caller holds the data folder's lock. Raise StartupError.
    """
    async with open_objects(settings) as objects:
        with _starting():
            await _refuse_lost_database(settings, objects)
        async with open_store(settings) as store:
            with _starting():
                await identity_check(settings, store=store, objects=objects).claim()
            yield store, objects


async def adopt_objects(settings: Settings) -> None:
    """Make the database and the objects that the settings name belong together. Raise StartupError."""
    make_folder(settings.data_dir)
    with own_folder(settings):
        async with open_store(settings) as store, open_shared_objects(settings) as objects:
            with _starting():
                await identity_check(settings, store=store, objects=objects).adopt()


def identity_check(settings: Settings, *, store: Store, objects: Objects) -> IdentityCheck:
    """Return the check of the database and the objects that the settings name."""
    return IdentityCheck(
        store=store,
        objects=objects,
        random=SystemRandom(),
        database=database_name(settings),
        place=objects_name(settings),
    )


def database_name(settings: Settings) -> str:
    """Return the name of the database for a message, without a password."""
    if settings.database_url is None:
        return f"the database {_sqlite_path(settings)}"
    parts = urlsplit(settings.database_url.get_secret_value())
    host = f" on {parts.hostname}:{parts.port or _POSTGRES_PORT}" if parts.hostname else ""
    return f"the PostgreSQL database {parts.path.strip('/')}{host}"


def objects_name(settings: Settings) -> str:
    """Return the name of the folder or bucket for a message."""
    if settings.storage_url is None:
        return f"the folder {settings.data_dir / 'objects'}"
    return f"the bucket {settings.storage_url}"


async def _refuse_lost_database(settings: Settings, objects: Objects) -> None:
    """Raise WrongIdentity if the database of a data folder is gone but its objects are there.

    This comes before the database is opened, which would create an empty one.
    """
    if settings.database_url is None and not _sqlite_path(settings).exists():
        await refuse_lost_database(objects, database=database_name(settings), place=objects_name(settings))


@contextmanager
def _starting() -> Iterator[None]:
    """Raise StartupError if the database and the objects cannot be compared or do not belong together."""
    try:
        yield
    except WrongIdentity as error:
        raise StartupError(f"{str(error)[0].upper()}{str(error)[1:]}") from error
    except StoreDown as error:
        raise StartupError(f"The database cannot be used: {error}") from error
    except ObjectsDown as error:
        raise StartupError(f"The objects cannot be used: {error}") from error


@asynccontextmanager
async def open_objects(settings: Settings) -> AsyncIterator[Objects]:
    """Open the objects and clear what an earlier process left. The caller holds the data folder's lock."""
    make_folder(settings.data_dir)
    clear_workspace(settings.data_dir)
    async with open_shared_objects(settings) as objects:
        await objects.clear_temporary()
        yield objects


@asynccontextmanager
async def open_shared_objects(settings: Settings) -> AsyncIterator[LocalObjects | BucketObjects]:
    """Open the objects beside the process that holds the data folder's lock; clear nothing. Raise StartupError."""
    disk = ThreadPool(_DISK_THREADS, name="disk")
    if settings.storage_url is None:
        yield LocalObjects(settings.data_dir / "objects", disk, SystemRandom())
    else:
        bucket = _open_bucket(settings.storage_url, scratch=settings.data_dir / "scratch", disk=disk)
        yield bucket
        bucket.close()
    disk.close()


def _open_bucket(url: str, *, scratch: Path, disk: ThreadPool) -> BucketObjects:
    try:
        return BucketObjects.open(url, threads=disk, random=SystemRandom(), scratch=scratch)
    except ValueError as error:
        raise StartupError(f"BATCHLINE_STORAGE_URL cannot be used: {error}") from error


@asynccontextmanager
async def _sqlite(settings: Settings) -> AsyncIterator[Store]:
    make_folder(settings.data_dir)
    writer, reader = ThreadPool(1, name="sqlite-writer"), ThreadPool(1, name="sqlite-reader")
    path = _sqlite_path(settings)
    log = path.with_name(f"{path.name}-wal")
    if log.exists() and not path.exists():
        # SQLite would create an empty database and delete the log, which may hold the last commits.
        raise StartupError(f"The database {path} is missing, but its log {log.name} is there. Put the database back.")
    try:
        database = SqliteDatabase(path, clock=SystemClock(), writer=writer, reader=reader)
    except (sqlite3.Error, StoreDown) as error:
        raise StartupError(f"The database {path} cannot be opened: {error}") from error
    try:
        yield SqlStore(database)
    finally:
        writer.close()
        reader.close()
        database.close()


def _sqlite_path(settings: Settings) -> Path:
    return settings.data_dir / "batchline.sqlite"


@asynccontextmanager
async def _postgres(url: SecretStr, *, pooled: bool) -> AsyncIterator[Store]:
    try:
        database = await PostgresDatabase.open(
            url.get_secret_value(), pooled=pooled, size=_MAX_CONNECTIONS, clock=SystemClock()
        )
    except StoreDown as error:
        raise StartupError(f"BATCHLINE_DATABASE_URL cannot be used: {error}") from error
    try:
        yield SqlStore(database)
    finally:
        await database.close()
