"""Makes what a killed service leaves: batches in every state, and charged usage. Copies, damages and checks it."""

import asyncio
import json
import os
import shutil
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import asyncpg  # type: ignore[import-untyped]
from click.testing import CliRunner, Result

from batchline.app.backends import identity_check, open_shared_objects, open_store
from batchline.cli import main
from batchline.cli.loading import load_settings
from batchline.fsck.check import Fsck
from batchline.fsck.findings import Checked, FsckReport
from batchline.pipeline.damage import DamageLog
from batchline.ports import Clock, Objects, Store
from batchline.settings import DAY
from batchline.system import SystemClock
from batchline.telemetry.metrics import Metrics
from tests.support.clocks import SettableClock
from tests.support.postgres_server import Postgres
from tests.support.s3_server import Seaweed
from tests.support.service import (
    CHAT,
    Account,
    Service,
    await_end,
    chat_lines,
    counts_of,
    running_mock,
    submit,
    wait_until,
)

T = TypeVar("T")
_WHOLE = 1 << 40
_CONFIG = """
metering = true

[models.m]
input_price = 1.1
output_price = 0.7
"""
_FAST, _SLOW = "[[delay=0 huge=8000]]", "[[delay=2.5]]"


@dataclass(frozen=True, kw_only=True)
class StoredData:
    """A database and its objects, and the ids of the batches that were made there, by name."""

    data_dir: Path
    config: Path
    database_url: str | None = None
    storage_url: str | None = None
    account: Account = field(default_factory=dict)
    batches: dict[str, str] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, str]:
        named = {"data_dir": self.data_dir, "database_url": self.database_url, "storage_url": self.storage_url}
        return {name: str(value) for name, value in named.items() if value is not None}

    def fsck(self, *arguments: str) -> Result:
        """Run the command."""
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in self.settings.items()]
        return CliRunner().invoke(main, ["fsck", *arguments, *flags])

    def check(
        self, *, repair: bool = False, work_retention_seconds: int = DAY, clock: Clock | None = None
    ) -> FsckReport:
        """Run a check. Unless it gets a clock, it waits for nothing, and no time passes but in its pauses."""

        async def run() -> FsckReport:
            settings = load_settings(**self.settings)
            async with open_store(settings) as store, open_shared_objects(settings) as objects:
                fsck = Fsck(
                    store=store,
                    objects=objects,
                    identity=identity_check(settings, store=store, objects=objects),
                    damage_log=DamageLog(Metrics()),
                    clock=clock or SettableClock(now=SystemClock().now()),
                    work_retention_seconds=work_retention_seconds,
                    checked=Checked(),
                )
                return await fsck.run(repair=repair)

        return asyncio.run(run())

    def in_store(self, work: Callable[[Store], Awaitable[T]]) -> T:
        async def run() -> T:
            async with open_store(load_settings(**self.settings)) as store:
                return await work(store)

        return asyncio.run(run())

    def in_objects(self, work: Callable[[Objects], Awaitable[T]]) -> T:
        async def run() -> T:
            async with open_shared_objects(load_settings(**self.settings)) as objects:
                return await work(objects)

        return asyncio.run(run())

    def read(self, key: str) -> bytes:
        async def read(objects: Objects) -> bytes:
            return b"".join([chunk async for chunk in objects.stream(key, 0, _WHOLE)])

        return self.in_objects(read)

    def put(self, key: str, data: bytes) -> None:
        self.in_objects(lambda objects: objects.put(key, data))

    def delete(self, key: str) -> None:
        self.in_objects(lambda objects: objects.delete(key))

    def cut(self, key: str) -> None:
        data = self.read(key)
        self.put(key, data[: len(data) // 2])

    def flip(self, key: str) -> None:
        """Change one bit in the middle of an object."""
        data = bytearray(self.read(key))
        data[len(data) // 2] ^= 1
        self.put(key, bytes(data))

    def change(self, sql: str, *values: Any) -> None:
        """Change rows. Values are numbered $1, $2 and so on, in both dialects."""
        self._run(sql, *values)

    def rows(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        return self._run(sql, *values)

    def batch(self, name: str) -> dict[str, Any]:
        [row] = self.rows("SELECT * FROM batches WHERE id = $1", self.batches[name])
        return row

    def result(self, name: str, column: str = "output_file_id") -> dict[str, Any]:
        """Return the row of a result file of a batch."""
        [row] = self.rows("SELECT * FROM files WHERE id = $1", self.batch(name)[column])
        return row

    def segment(self, name: str, *, inline: bool) -> dict[str, Any]:
        """Return the first segment of a batch that is, or is not, stored in its row."""
        found = self.rows("SELECT * FROM segments WHERE batch_id = $1 ORDER BY id", self.batches[name])
        return next(row for row in found if (row["object_key"] is None) is inline)

    def shard(self, name: str, state: str) -> dict[str, Any]:
        found = self.rows("SELECT * FROM shards WHERE batch_id = $1 ORDER BY n", self.batches[name])
        return next(row for row in found if row["state"] == state)

    def _run(self, sql: str, *values: Any) -> list[dict[str, Any]]:
        if self.database_url is not None:
            return asyncio.run(_fetch(self.database_url, sql, values))
        numbered = {str(number): value for number, value in enumerate(values, 1)}
        with closing(sqlite3.connect(self.data_dir / "batchline.sqlite", isolation_level=None)) as connection:
            connection.row_factory = sqlite3.Row
            return [dict(row) for row in connection.execute(sql, numbered)]

    @contextmanager
    def served(self, upstream_url: str, **settings: object) -> Iterator[Service]:
        """Run the service on the data."""
        service = Service(
            self.data_dir,
            ("-m", "batchline", "serve"),
            self.settings | {"config": self.config, "upstream_url": upstream_url, "lease_seconds": 3} | settings,
            account=self.account or None,
            environment={name: value for name, value in os.environ.items() if name.startswith("AWS_")},
        )
        try:
            service.start()
            service.await_ready()
            yield service
        finally:
            service.end()

    def copy(self, folder: Path, postgres: Postgres | None, bucket: Seaweed | None) -> "StoredData":
        """Copy everything to another place, which has the same identity."""
        copied = replace(self, data_dir=folder / "data")
        shutil.copytree(self.data_dir, copied.data_dir, ignore=shutil.ignore_patterns("lock", "scratch"))
        if self.database_url is not None and postgres is not None:
            postgres.dump(self.database_url, folder / "dump")
            copied = replace(copied, database_url=postgres.restore(folder / "dump"))
        if self.storage_url is not None and bucket is not None:
            copied = replace(copied, storage_url=bucket.new_url())
            bucket.copy(self.storage_url, str(copied.storage_url))
        return copied


async def _fetch(url: str, sql: str, values: tuple[Any, ...]) -> list[dict[str, Any]]:
    connection = await asyncpg.connect(url)
    try:
        return [dict(row) for row in await connection.fetch(sql, *values)]
    finally:
        await connection.close()


def empty_data(folder: Path, *, database_url: str | None = None, storage_url: str | None = None) -> StoredData:
    """Return a place where nothing is stored yet."""
    config = folder / "batchline.toml"
    config.write_text(_CONFIG)
    return StoredData(data_dir=folder / "data", config=config, database_url=database_url, storage_url=storage_url)


def make_data(data: StoredData) -> StoredData:
    """Run a service that ends batches in every way and is killed while others run."""
    batches = {}
    with running_mock() as mock, data.served(mock.url, max_concurrency=64) as service:
        client = service.client()

        def create(name: str, prompts: list[str]) -> str:
            batch = submit(client, chat_lines(prompts))
            batches[name] = batch.id
            return batch.id

        for name in ("large", "small"):
            lines = 40 if name == "large" else 5
            create(name, [f"{_FAST if name == 'large' else ''} {n}" for n in range(lines)] + ["[[status=400]]"])
        for name in ("cancelled", "expired"):
            # One line is recorded soon, and the others are too slow to end before the batch is stopped.
            create(name, [f"{_SLOW if n else ''} {name} {n}" for n in range(250)])
            _await_recorded(client, batches[name], 1)
            if name == "cancelled":
                client.batches.cancel(batches[name])
            else:
                data.change("UPDATE batches SET expires_at = created_at WHERE id = $1", batches[name])
            assert await_end(client, batches[name]).status == name
        for name in ("large", "small"):
            assert await_end(client, batches[name]).status == "completed"
        client.files.delete(client.batches.retrieve(batches["small"]).input_file_id)
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "at once"}]}).encode()
        assert service.call("POST", CHAT, body=body, headers={"content-type": "application/json"}).status == 200
        refused = client.files.create(file=b"no JSON\n", purpose="batch")
        headers = {"content-type": "application/json"}
        request = json.dumps({"input_file_id": refused.id, "endpoint": CHAT, "completion_window": "24h"}).encode()
        assert service.call("POST", "/v1/batches", body=request, headers=headers).status == 400
        mock.follow(delay=1000)
        # A few lines get no answer, and must not take all slots.
        create("running", [f"{'' if n % 10 == 0 else _FAST} running {n}" for n in range(40)])
        create("slow", [f"{'' if n % 5 == 0 else '[[delay=0]]'} slow {n}" for n in range(10)])
        _await_recorded(client, batches["running"], 36)
        _await_recorded(client, batches["slow"], 8)
        service.kill()
    return replace(data, account=service.account, batches=batches)


def _await_recorded(client: Any, batch_id: str, lines: int) -> None:
    wait_until(lambda: counts_of(client.batches.retrieve(batch_id))[1] >= lines, what=f"{lines} recorded lines")
