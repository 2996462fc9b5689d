"""Opens the store and the objects that the settings name: SQLite and a folder, or PostgreSQL and a bucket."""

import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import SecretStr

from batchline.app.startup import StartupError, folder_lock, make_folder, own_folder
from batchline.backup.workspace import clear_workspace
from batchline.domain.errors import ObjectsDown, StoreDown, WrongIdentity
from batchline.objects.bucket import BucketObjects
from batchline.objects.local import LocalObjects
from batchline.pipeline.identity import IdentityCheck, refuse_lost_database
from batchline.ports import Objects, Store, StoreClock, WatchedClock
from batchline.settings import Settings
from batchline.store.postgres.clock import DatabaseClock
from batchline.store.postgres.database import PostgresDatabase
from batchline.store.postgres.migrate import await_version, migrate
from batchline.store.sqlite.clock import ClockFile, FollowingClock, TrustedClock
from batchline.store.sqlite.database import SqliteDatabase
from batchline.store.sqlite.database import migrate as migrate_sqlite
from batchline.store.store import SqlStore
from batchline.system import CommandClock, SystemClock, SystemRandom, ThreadPool

_MAX_CONNECTIONS = 8
DISK_THREADS = 4
_POSTGRES_PORT = 5432


@asynccontextmanager
async def open_store(settings: Settings) -> AsyncIterator[Store]:
    """Open the store for a command. A service may be running on it. Raise StartupError."""
    if settings.database_url is None:
        async with _sqlite(settings, CommandClock()) as store:
            yield store
    else:
        async with _postgres(settings.database_url, pooled=settings.database_pooler) as database:
            yield SqlStore(database)


@asynccontextmanager
async def open_service_store(settings: Settings) -> AsyncIterator[tuple[Store, WatchedClock]]:
    """Open the store of a service with the clock that decides. The caller holds the data folder's lock.

    Raise StartupError.
    """
    if settings.database_url is None:
        async with _sqlite_with_clock(settings, TrustedClock) as opened:
            yield opened
        return
    async with _postgres(settings.database_url, pooled=settings.database_pooler) as database:
        clock = DatabaseClock(SystemClock(), database)
        await _check_first(clock)
        yield SqlStore(database), clock


@asynccontextmanager
async def open_child_store(settings: Settings) -> AsyncIterator[tuple[Store, WatchedClock]]:
    """Open the store of a worker process, whose clock follows that of the service. Raise StartupError."""
    async with _sqlite_with_clock(settings, FollowingClock) as opened:
        yield opened


def has_database(settings: Settings) -> bool:
    """Return whether the database that the settings name may exist. For PostgreSQL this is always True.

    If only the log of a database exists, the database was moved away: then opening it raises an error that says so.
    """
    path = _database_file(settings)
    return settings.database_url is not None or path.exists() or _log_of(path).exists()


def clock_file(settings: Settings) -> ClockFile:
    """Return the file in which a service on SQLite keeps the time that it trusts."""
    return ClockFile(settings.data_dir)


async def migrate_store(settings: Settings) -> str:
    """Bring the schema up to date and return the name of the database for a message. Raise StartupError.

    The database of a data folder is migrated only while no service uses the folder.
    """
    if settings.database_url is None:
        make_folder(settings.data_dir)
        with folder_lock(settings.data_dir):
            await migrate_own_store(settings)
        return f"the database in {settings.data_dir}"
    await migrate_own_store(settings)
    return "the PostgreSQL database"


async def await_migration(settings: Settings, *, on_wait: Callable[[str], None]) -> None:
    """Wait until another process has migrated the PostgreSQL database. Raise StartupError.

    ``on_wait`` gets the reason before each wait.
    """
    if settings.database_url is None:
        raise StartupError("--wait is for PostgreSQL: set BATCHLINE_DATABASE_URL. A data folder is migrated by serve.")
    try:
        await await_version(settings.database_url.get_secret_value(), clock=SystemClock(), on_wait=on_wait)
    except StoreDown as error:
        raise StartupError(f"BATCHLINE_DATABASE_URL cannot be used: {error}") from error


async def migrate_own_store(settings: Settings) -> None:
    """Bring the schema up to date. The caller holds the data folder's lock. Raise StartupError."""
    url, path = settings.database_url, _database_file(settings)
    if url is not None:
        try:
            await migrate(url.get_secret_value())
        except StoreDown as error:
            raise StartupError(f"BATCHLINE_DATABASE_URL cannot be used: {error}") from error
        return
    _require_beside_its_log(path)
    if not path.exists():
        await _refuse_lost_database(settings)
    try:
        migrate_sqlite(path)
    except (sqlite3.Error, StoreDown) as error:
        raise StartupError(f"The database {path} cannot be opened: {error}") from error


@asynccontextmanager
async def open_both(settings: Settings) -> AsyncIterator[tuple[Store, Objects, WatchedClock]]:
    """Open the store and the objects of a process that starts, after a check that both belong together.

    With them comes the clock that decides. The caller holds the data folder's lock. Raise StartupError.
    """
    async with open_objects(settings) as objects, open_service_store(settings) as (store, clock):
        with startup_errors():
            await identity_check(settings, store=store, objects=objects).claim()
        yield store, objects, clock


async def adopt_objects(settings: Settings) -> None:
    """Make the database and the objects that the settings name belong together. Raise StartupError."""
    make_folder(settings.data_dir)
    with own_folder(settings):
        async with open_store(settings) as store, open_shared_objects(settings) as objects:
            with startup_errors():
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
        return f"the database {_database_file(settings)}"
    parts = urlsplit(settings.database_url.get_secret_value())
    host = f" on {parts.hostname}:{parts.port or _POSTGRES_PORT}" if parts.hostname else ""
    return f"the PostgreSQL database {parts.path.strip('/')}{host}"


def objects_name(settings: Settings) -> str:
    """Return the name of the folder or bucket for a message."""
    if settings.storage_url is None:
        return f"the folder {settings.data_dir / 'objects'}"
    return f"the bucket {settings.storage_url}"


async def _refuse_lost_database(settings: Settings) -> None:
    """Raise StartupError if there are objects; call it if the database of a data folder does not exist.

    This comes before the database is migrated, which would create an empty one.
    """
    async with open_shared_objects(settings) as objects:
        with startup_errors():
            await refuse_lost_database(objects, database=database_name(settings), place=objects_name(settings))


@contextmanager
def startup_errors() -> Iterator[None]:
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
    """Open the objects and clear the leftovers of an earlier process. The caller holds the data folder's lock."""
    make_folder(settings.data_dir)
    clear_workspace(settings.data_dir)
    async with open_shared_objects(settings) as objects:
        await objects.clear_temporary()
        yield objects


@asynccontextmanager
async def open_shared_objects(settings: Settings) -> AsyncIterator[LocalObjects | BucketObjects]:
    """Open the objects beside the process that holds the data folder's lock; clear nothing. Raise StartupError."""
    with closing(ThreadPool(DISK_THREADS, name="disk")) as disk:
        if settings.storage_url is None:
            yield LocalObjects(settings.data_dir / "objects", disk, SystemRandom())
            return
        with closing(_open_bucket(settings.storage_url, scratch=settings.data_dir / "scratch", disk=disk)) as bucket:
            yield bucket


def _open_bucket(url: str, *, scratch: Path, disk: ThreadPool) -> BucketObjects:
    try:
        return BucketObjects.open(url, threads=disk, random=SystemRandom(), scratch=scratch)
    except ValueError as error:
        raise StartupError(f"BATCHLINE_STORAGE_URL cannot be used: {error}") from error


def _database_file(settings: Settings) -> Path:
    return settings.data_dir / "batchline.sqlite"


def _log_of(database: Path) -> Path:
    return database.with_name(f"{database.name}-wal")


def _require_beside_its_log(path: Path) -> None:
    """Raise StartupError if there is a log without its database.

    SQLite would create an empty database and delete the log, which may hold the last commits.
    """
    log = _log_of(path)
    if log.exists() and not path.exists():
        raise StartupError(f"The database {path} is missing, but its log {log.name} is there. Put the database back.")


@asynccontextmanager
async def _sqlite_with_clock(
    settings: Settings, kind: type[TrustedClock | FollowingClock]
) -> AsyncIterator[tuple[Store, WatchedClock]]:
    make_folder(settings.data_dir)
    threads = ThreadPool(1, name="clock")
    clock = kind(SystemClock(), file=clock_file(settings), threads=threads)
    try:
        await _check_first(clock)
        async with _sqlite(settings, clock) as store:
            yield store, clock
    finally:
        threads.close()


async def _check_first(clock: WatchedClock) -> None:
    """Check the clock before anything is written or decided by it. Raise StartupError."""
    try:
        await clock.check()
    except StoreDown as error:
        raise StartupError(f"The service cannot start, because {error}") from error


@asynccontextmanager
async def _sqlite(settings: Settings, clock: StoreClock) -> AsyncIterator[Store]:
    make_folder(settings.data_dir)
    writer, reader = ThreadPool(1, name="sqlite-writer"), ThreadPool(1, name="sqlite-reader")
    path = _database_file(settings)
    _require_beside_its_log(path)
    try:
        database = SqliteDatabase(path, clock=clock, writer=writer, reader=reader)
    except (sqlite3.Error, StoreDown) as error:
        raise StartupError(f"The database {path} cannot be opened: {error}") from error
    try:
        yield SqlStore(database)
    finally:
        writer.close()
        reader.close()
        database.close()


@asynccontextmanager
async def _postgres(url: SecretStr, *, pooled: bool) -> AsyncIterator[PostgresDatabase]:
    try:
        database = await PostgresDatabase.open(
            url.get_secret_value(), pooled=pooled, size=_MAX_CONNECTIONS, clock=SystemClock()
        )
    except StoreDown as error:
        raise StartupError(f"BATCHLINE_DATABASE_URL cannot be used: {error}") from error
    try:
        yield database
    finally:
        await database.close()
