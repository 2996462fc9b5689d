"""Runs PgBouncer in transaction mode: every transaction may use another connection of the server."""

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.postgres_server import Postgres
from tests.support.s3_server import SUPERVISOR
from tests.support.service import Program, wait_until

_CONFIG = """
[databases]
* = host=127.0.0.1 port={server} user=postgres
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 8
max_client_conn = 200
"""
_AS_USER = "user = nobody\n"
"""PgBouncer refuses to run as root, as PostgreSQL does."""


class Pooler:
    def __init__(self, program: Program, port: int) -> None:
        self._program, self.port = program, port

    @property
    def pid(self) -> int:
        (child,) = [each for each in self._program.family() if each.pid != self._program.pid]
        return int(child.pid)


@contextmanager
def running_pooler(folder: Path, postgres: Postgres) -> Iterator[Pooler]:
    command = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
    if command is None:
        pytest.skip("PgBouncer is not installed: apt install pgbouncer")
    port = _free_port()
    config = folder / "pgbouncer.ini"
    config.write_text(_CONFIG.format(server=postgres.port, port=port) + (_AS_USER if os.geteuid() == 0 else ""))
    program = Program("-c", SUPERVISOR, command, str(config))
    try:
        wait_until(lambda: _listens(program, port), what="PgBouncer")
        yield Pooler(program, port)
    finally:
        program.end()


def _listens(program: Program, port: int) -> bool:
    assert program.exit_code is None, program.log
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
