"""Starts batchline as it is measured: in its own process, on SQLite and a folder or on PostgreSQL and S3."""

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

StorageSettings = dict[str, Any]
"""The settings that say where batchline stores its data."""


class Backend:
    """Where batchline stores its data, and the processes of the database and the bucket."""

    def __init__(self, name: str, new_storage: Callable[[], StorageSettings], *, pids: tuple[int, ...] = ()) -> None:
        self.name = name
        self._new_storage = new_storage
        self.pids = pids

    def storage(self, folder: Path) -> StorageSettings:
        """Return settings with this data folder, and with a new database and a new bucket."""
        return {"data_dir": folder, **self._new_storage()}


class Batchline:
    """A running service with a key to it."""

    def __init__(self, program: Program, backend: Backend, storage: StorageSettings) -> None:
        self.backend = backend
        self.pid = program.pid
        self.port = int(program.wait_for_log(r"batchline listens.* url=http://127\.0\.0\.1:(\d+)"))
        account = json.loads(_command("keys", "create", "--json", settings=storage))
        self.headers = {"x-api-key": account["api_key"], "x-project-id": account["project_id"]}


@contextmanager
def running_batchline(
    storage: StorageSettings, backend: Backend, upstream_url: str, **settings: object
) -> Iterator[Batchline]:
    """Run a service on this storage, which may be prefilled. ``settings`` are settings of batchline."""
    flags = _flags(storage | settings | {"port": 0, "upstream_url": upstream_url})
    program = Program("-m", "batchline", "serve", *flags)
    try:
        yield Batchline(program, backend, storage)
    finally:
        program.end()


@contextmanager
def running_backend(name: str, folder: Path) -> Iterator[Backend]:
    if name == EMBEDDED:
        yield Backend(EMBEDDED, dict)
        return
    children_before = _children()
    with running_postgres(durable=True) as postgres, running_seaweed(folder / "seaweed") as seaweed:
        # batchline's processes inherit the environment.
        os.environ.update(seaweed.environment)

        def new_storage() -> StorageSettings:
            return {"database_url": postgres.new_database(empty=True), "storage_url": seaweed.new_url()}

        yield Backend(POSTGRES, new_storage, pids=tuple(_children() - children_before))


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


def _command(*arguments: str, settings: StorageSettings) -> str:
    storage = {name: value for name, value in settings.items() if name != "storage_url"}
    command = [sys.executable, "-m", "batchline", *arguments, *_flags(storage)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _flags(settings: Mapping[str, object]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
