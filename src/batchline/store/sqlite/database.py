"""Runs scripts on SQLite: one writer thread that groups commits, and one reader with its own connection."""

import os
import sqlite3
from collections import deque
from collections.abc import Callable
from contextlib import closing, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any, Generic, TypeVar

from batchline.domain.errors import StoreDown
from batchline.ports import StoreClock, Threads
from batchline.store.sql import Result, Row, Script, Statement, load_queries

T = TypeVar("T")
_PACKAGE = "batchline.store.sqlite"
_BUSY_TIMEOUT_SECONDS = 5.0
_MAX_WAL_ATTEMPTS = 20
_OLDER = (
    "it was made by an older version of batchline. Stop the service that uses it, if one runs, and run: "
    "batchline migrate. `batchline serve` does that too when it starts"
)


class SqliteDatabase:
    """The database of one machine. ``writer`` must run calls one at a time.

    A file that does not exist yet is created. One of another version is refused: only ``migrate`` changes tables.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: StoreClock,
        writer: Threads,
        reader: Threads,
        busy_timeout_seconds: float = _BUSY_TIMEOUT_SECONDS,
    ) -> None:
        self._path = path
        self._clock = clock
        self._writer, self._reader = writer, reader
        self._queries = load_queries(_PACKAGE)
        self._queue: deque[_Job[Any]] = deque()
        self._for_writing = _connect(path, busy_timeout_seconds)
        self.schema_version = len(_migrations())
        if _version(self._for_writing) == 0:
            # A new database: there is nothing to lose.
            _migrate(self._for_writing)
        require_own_version(self._for_writing)
        self._for_reading = _connect(path, busy_timeout_seconds)
        self._for_reading.execute("PRAGMA query_only = ON")

    async def read(self, script: Callable[[], Script[T]]) -> T:
        """Run a script that changes nothing, on one snapshot. Raise StoreDown."""
        return await self._reader.run(lambda: self._read(script))

    async def write(self, script: Callable[[], Script[T]]) -> T:
        """Run a script as one durable transaction. Raise StoreDown, and then nothing was committed.

        All scripts that are queued when the writer thread is free share one commit, and so one wait for the disk.
        """
        job = _Job(script)
        self._queue.append(job)
        await self._writer.run(lambda: self._drain(job))
        return job.value()

    def close(self) -> None:
        """Close both connections."""
        self._for_reading.close()
        self._for_writing.close()

    def _read(self, script: Callable[[], Script[T]]) -> T:
        connection = self._for_reading
        try:
            connection.execute("BEGIN")
            try:
                return self._run(connection, script())
            finally:
                connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise StoreDown(str(error)) from error

    def _drain(self, wanted: "_Job[Any]") -> None:
        if wanted.ended:
            return
        jobs = [self._queue.popleft() for _ in range(len(self._queue))]
        connection = self._for_writing
        try:
            connection.execute("BEGIN IMMEDIATE")
            for job in jobs:
                self._run_job(connection, job)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            for job in jobs:
                job.failure = StoreDown(str(error))
            _roll_back(connection)
        else:
            for job in jobs:
                job.committed = True

    def _run_job(self, connection: sqlite3.Connection, job: "_Job[Any]") -> None:
        """Run a script in a savepoint. An error undoes this script alone, and is raised to its own caller alone."""
        connection.execute("SAVEPOINT job")
        try:
            job.result = self._run(connection, job.script())
        except Exception as error:
            if isinstance(error, sqlite3.Error) and not isinstance(error, sqlite3.IntegrityError):
                raise
            connection.execute("ROLLBACK TO job")
            job.failure = error
        connection.execute("RELEASE job")

    def _run(self, connection: sqlite3.Connection, script: Script[T]) -> T:
        try:
            statement = next(script)
            while True:
                statement = script.send(self._execute(connection, statement))
        except StopIteration as stop:
            value: T = stop.value
            return value

    def _execute(self, connection: sqlite3.Connection, statement: Statement) -> Result:
        sql = self._queries[statement.name]
        if statement.many is not None and not statement.fetch:
            return Result([], connection.executemany(sql, statement.many).rowcount)
        clocks = self._read_clocks()
        found: list[Row] = []
        for params in [statement.params] if statement.many is None else statement.many:
            cursor = connection.execute(sql, {**clocks, **params})
            found += cursor.fetchall()
        return Result(found, cursor.rowcount)

    def _read_clocks(self) -> dict[str, float]:
        """Return what queries take from the clock: ``now`` for leases, ``time`` to write, ``due`` to end things by."""
        return {"now": self._clock.steady(), "time": int(self._clock.now()), "due": int(self._clock.due())}


class _Job(Generic[T]):
    """A script in the queue of the writer, and its outcome."""

    def __init__(self, script: Callable[[], Script[T]]) -> None:
        self.script = script
        self.result: T | None = None
        self.failure: Exception | None = None
        self.committed = False

    @property
    def ended(self) -> bool:
        """Whether the outcome is known."""
        return self.committed or self.failure is not None

    def value(self) -> T:
        """Return the value of a committed script, or raise its error."""
        if self.failure is not None:
            raise self.failure
        if not self.committed:
            raise StoreDown("the transaction did not run")
        return self.result  # type: ignore[return-value]  # set, as nothing failed


def _connect(path: Path, busy_timeout_seconds: float) -> sqlite3.Connection:
    _create_private(path)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.row_factory = sqlite3.Row
    connection.execute(f"PRAGMA busy_timeout = {round(busy_timeout_seconds * 1000)}")
    _switch_to_wal(connection)
    # FULL: a commit is on the disk before it is reported. fullfsync: on macOS fsync alone ends at the drive's cache.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA fullfsync = ON")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _create_private(path: Path) -> None:
    """Create the file if there is none: SQLite would create it for everyone to read. Its log gets the same mode.

    A file that exists is not opened: closing it would take the locks of this process from it.
    """
    with suppress(OSError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """Switch to a write-ahead log.

    The switch fails at once while another process creates the database; so after a failure an empty transaction waits
    for that process.
    """
    for _ in range(_MAX_WAL_ATTEMPTS - 1):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        else:
            return
    connection.execute("PRAGMA journal_mode = WAL")


def migrate(path: Path) -> None:
    """Create the tables, or bring those of an older version up to date. Raise StoreDown or sqlite3.Error.

    The caller holds the data folder's lock: a service that runs expects the tables of its own version.
    """
    with closing(_connect(path, _BUSY_TIMEOUT_SECONDS)) as connection:
        _migrate(connection)


def require_own_version(connection: sqlite3.Connection) -> None:
    """Raise StoreDown unless the tables have the version that this program expects."""
    version, expected = _version(connection), len(_migrations())
    _refuse_newer(version, expected)
    if version < expected:
        raise StoreDown(_OLDER)


def _migrate(connection: sqlite3.Connection) -> None:
    """Run the migrations. Several processes may create tables at once, so read the version again in the transaction."""
    scripts = _migrations()
    _refuse_newer(_version(connection), len(scripts))
    connection.execute("BEGIN IMMEDIATE")
    for script in scripts[_version(connection) :]:
        for statement in _statements(script):
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {len(scripts)}")
    connection.execute("COMMIT")


def _refuse_newer(version: int, expected: int) -> None:
    if version > expected:
        raise StoreDown("it was made by a newer version of batchline; use that one")


def _version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def _migrations() -> list[str]:
    scripts = sorted(files(_PACKAGE).joinpath("migrations").iterdir(), key=lambda script: script.name)
    return [script.read_text() for script in scripts]


def _statements(script: str) -> list[str]:
    found, text = [], ""
    for line in script.splitlines(keepends=True):
        text += line
        if sqlite3.complete_statement(text):
            found.append(text)
            text = ""
    return found


def _roll_back(connection: sqlite3.Connection) -> None:
    """Roll back, unless SQLite did so by itself, as after some errors. If it fails, the next job tries again."""
    if connection.in_transaction:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
