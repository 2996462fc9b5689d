"""batchline as it is measured: a process of its own, on embedded parts or on PostgreSQL and S3."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from tests.support.postgres_server import running_postgres
from tests.support.s3_server import running_seaweed
from tests.support.service import Program

EMBEDDED, POSTGRES = "embedded", "postgres"
BACKENDS = (EMBEDDED, POSTGRES)

Places = dict[str, Any]
"""Settings that say where a batchline keeps what it has."""


class Backend:
    """Where a batchline keeps what it has, and the processes that work for it there."""

    def __init__(self, name: str, new_places: Callable[[], Places], *, pids: tuple[int, ...] = ()) -> None:
        self.name = name
        self._new_places = new_places
        self.pids = pids

    def places(self, folder: Path) -> Places:
        """This data folder, with a database and a bucket that nobody used yet."""
        return {"data_dir": folder, **self._new_places()}


class Batchline:
    """A running service with a key to it."""

    def __init__(self, program: Program, backend: Backend, places: Places) -> None:
        self.backend = backend
        self.pid = program.pid
        self.port = int(program.wait_for_log(r"batchline listens.* url=http://127\.0\.0\.1:(\d+)"))
        account = json.loads(_command("keys", "create", "--json", places=places))
        self.headers = {"x-api-key": account["api_key"], "x-project-id": account["project_id"]}


@contextmanager
def running_batchline(places: Places, backend: Backend, upstream_url: str, **settings: object) -> Iterator[Batchline]:
    """In places of the backend, which may have been filled before. Settings are those of batchline."""
    flags = _flags(places | settings | {"port": 0, "upstream_url": upstream_url})
    program = Program("-m", "batchline", "serve", *flags)
    try:
        yield Batchline(program, backend, places)
    finally:
        program.end()


@contextmanager
def running_backend(name: str, folder: Path) -> Iterator[Backend]:
    if name == EMBEDDED:
        yield Backend(EMBEDDED, dict)
        return
    ours = _children()
    with running_postgres(durable=True) as postgres, running_seaweed(folder / "seaweed") as seaweed:
        # The processes of batchline inherit them.
        os.environ.update(seaweed.environment)

        def new_places() -> Places:
            return {"database_url": postgres.new_database(empty=True), "storage_url": seaweed.new_url()}

        yield Backend(POSTGRES, new_places, pids=tuple(_children() - ours))


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def _command(*arguments: str, places: Places) -> str:
    known = {name: value for name, value in places.items() if name != "storage_url"}
    command = [sys.executable, "-m", "batchline", *arguments, *_flags(known)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _flags(settings: Mapping[str, object]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
