"""Makes the data of a service with rows in every state, as a killed service leaves it, and saves it as text.

``python -m tests.support.upgrade_maker`` writes ``tests/upgrade/fixtures/NNNN``, where NNNN is the version of the
schema that the code has. It is run once for each version that is released, and never again for an earlier one: the
files are what users have on their disks, and every later version must open them. ``tests/upgrade`` does.

The rows are written by the real store, and the objects by the real pipeline. What no process does at a certain moment,
such as dying between two steps, is done here by calling one step and not the next.
"""

import asyncio
import json
import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from decimal import Decimal
from hashlib import sha256
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
from pydantic import SecretStr

from batchline.app.backends import migrate_store, open_objects, open_service_store
from batchline.app.roles import new_context
from batchline.app.upstreams import open_upstreams
from batchline.cli.new_key import hint, new_key, new_secret
from batchline.domain import ids
from batchline.domain.bitmap import unsettled
from batchline.domain.fleet import Report, UpstreamLoad
from batchline.domain.held_bytes import HeldBytes
from batchline.domain.lines import Line, decode_lines
from batchline.domain.outcomes import Failure, Success, error_line, output_line
from batchline.domain.progress import LineErrors
from batchline.domain.records import Batch, Charge, File, Owner, Segment, Shard
from batchline.domain.states import TERMINAL
from batchline.domain.usage import Usage
from batchline.engine import Context, Engine
from batchline.pipeline.batch_ends import BatchEnds
from batchline.pipeline.create import CreateRequest
from batchline.pipeline.finalize import Finalizer
from batchline.pipeline.repair import Repair
from batchline.pipeline.reuse import ReuseStep
from batchline.pipeline.validation_pool import ValidationPool
from batchline.ports import NewBatch
from batchline.settings import ModelSettings, Settings
from batchline.store.postgres.migrate import expected_version
from batchline.system import SystemClock, SystemRandom
from batchline.telemetry.metrics import Metrics
from tests.support.postgres_server import Postgres, installation, running_postgres
from tests.support.service import CHAT, chat_lines, running_mock
from tests.support.stores import moved_on
from tests.support.upgrade_fixture import FIXTURES, Expected

_DEAD = "a-process-that-was-killed"
_LEASE_SECONDS = 5.0
_DAY_SECONDS = 86_400
_PRICES = {"m": ModelSettings(input_price=Decimal("1.1"), output_price=Decimal("0.7"))}
_BAD_LINE = Failure("invalid_request_error", "http_400", "the line is wrong", "messages")
_LINES_PER_SHARD = 8


def make_all() -> None:
    """Write the fixtures of the schema that this code has."""
    target = FIXTURES / f"{expected_version():04}"
    with running_mock() as mock, tempfile.TemporaryDirectory() as folder, running_postgres() as postgres:
        for kind in ("sqlite", "postgres"):
            data_dir = Path(folder) / kind
            url = postgres.new_database(empty=True) if kind == "postgres" else None
            settings = Settings(
                data_dir=data_dir,
                upstream_url=mock.url,
                database_url=None if url is None else SecretStr(url),
                metering=True,
                work_retention_seconds=0,
                models=_PRICES,
            )
            expected = asyncio.run(_make(settings))
            _save(target / kind, data_dir, expected, postgres, url)


def _save(target: Path, data_dir: Path, expected: Expected, postgres: Postgres, url: str | None) -> None:
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    dump = _dump_sqlite(data_dir / "batchline.sqlite") if url is None else _dump_postgres(url)
    (target / "database.sql").write_text(dump)
    shutil.copytree(data_dir / "objects", target / "objects")
    (target / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


def _dump_sqlite(database: Path) -> str:
    with closing(sqlite3.connect(database)) as connection:
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        return "\n".join([*connection.iterdump(), f"PRAGMA user_version = {version};", ""])


def _dump_postgres(url: str) -> str:
    command = [str(installation() / "bin" / "pg_dump"), "--no-owner", "--no-privileges", "--rows-per-insert=100", url]
    dump = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # Lines that begin with a backslash are for psql alone.
    return "".join(line for line in dump.splitlines(keepends=True) if not line.startswith("\\"))


async def _make(settings: Settings) -> Expected:
    await migrate_store(settings)
    async with _opened(settings) as context:
        maker = _Maker(context)
        await maker.make()
        return maker.expected


@asynccontextmanager
async def _opened(settings: Settings) -> AsyncIterator[Context]:
    held_bytes = HeldBytes(settings.max_held_bytes)
    async with (
        open_upstreams(settings, lambda _name, _done, _total: None, held_bytes=held_bytes) as upstreams,
        open_service_store(settings) as (store, clock),
        open_objects(settings) as objects,
    ):
        yield new_context(
            settings,
            store=store,
            objects=objects,
            upstreams=upstreams,
            held_bytes=held_bytes,
            metrics=Metrics(),
            owner=_DEAD,
            clock=clock,
        )


class _Maker:
    """Fills a store. The order matters where a step takes whatever is open, such as a claim or an expiry."""

    def __init__(self, context: Context) -> None:
        self._context, self._store, self._objects = context, context.store, context.objects
        self._shared = context.settings.database_url is not None
        self._validator = ValidationPool()
        self._engine = Engine(context, validator=self._validator, shared=self._shared)
        self._services = self._engine.api_role.services
        self._segments = 0
        self._now = int(SystemClock().now())
        self.expected: Expected = {"made_at": self._now, "accounts": {}, "batches": [], "files": {}, "gone": []}

    async def make(self) -> None:
        await self._accounts()
        await self._files()
        await self._ended_by_the_engine()
        await self._ended_with_work()
        await self._finalizing()
        await self._drained()
        await self._cancelling()
        await self._expiring()
        await self._half_run()
        await self._struck()
        await self._open()
        await self._validating()
        await self._store.heartbeat(
            Report(owner=_DEAD, runs_batches=True, upstream_loads={"default": UpstreamLoad(in_flight=3)}),
            caps={"default": 10},
            lease=_LEASE_SECONDS,
        )
        self._validator.close()

    async def _accounts(self) -> None:
        await self._store.start_metering(5_000_000_000, at=self._now)
        for name, project, organization in (
            ("alpha", "alpha", "first"),
            ("beta", "naïve β", "second"),
            ("rotated", "alpha", "first"),
            ("revoked", "alpha", "first"),
            ("revoked while its batch runs", "alpha", "first"),
        ):
            await self._account(name, project, organization)
        await self._rotate("rotated")
        await self._store.revoke_key(self._owners["revoked"].key_id, at=self._now)
        await self._store.set_funds(
            self._owner.organization_id, balance=7_000_000_000, credits=1_500_000_000, at=self._now
        )
        usage = Usage(input_tokens=1000, cached_tokens=100, output_tokens=500, reasoning_tokens=50)
        await self._store.charge(
            self._owner, Charge(model="m", requests=2, usage=usage, cost=1_600_000_000), at=self._now
        )
        await self._store.touch_keys({self._owner.key_id: self._now})

    _owners: dict[str, Owner]

    @property
    def _owner(self) -> Owner:
        return self._owners["alpha"]

    async def _account(self, name: str, project: str, organization: str) -> None:
        secret = new_secret()
        owner = await self._store.create_key(new_key(secret, project=project, organization=organization))
        self._owners = {**getattr(self, "_owners", {}), name: owner}
        self.expected["accounts"][name] = {
            "api_key": secret,
            "project_id": owner.project_id,
            "key_id": owner.key_id,
            "organization_id": owner.organization_id,
        }

    async def _rotate(self, name: str) -> None:
        secret = new_secret()
        digest = ids.key_digest(secret)
        assert await self._store.rotate_key(self._owners[name].key_id, digest=digest, hint=hint(secret))
        self.expected["accounts"][name]["api_key"] = secret

    async def _files(self) -> None:
        data = b"not JSON, and a file all the same\r\n\xff\xfe\n"
        stored = await self._upload(data, filename='say "hi" \u6f22\u5b57 ' + "n" * 300 + ".jsonl")
        self.expected["files"][stored.id] = {"sha256": sha256(data).hexdigest(), "filename": stored.filename}
        deleted = await self._upload(data, filename="deleted.jsonl")
        await self._store.delete_file(self._owner.project_id, deleted.id, at=self._now)
        expired = await self._upload(data, filename="expired.jsonl", expires_after=3600)
        await self._let_end("files", expired.id)
        for key in await self._store.expire_files(owner=_DEAD, limit=10):
            await self._objects.delete(key)
        abandoned, uploading = self._file("abandoned"), self._file("uploading")
        await self._store.begin_upload(abandoned, owner=_DEAD, lease=_LEASE_SECONDS)
        await self._store.abandon_upload(abandoned.id, owner=_DEAD)
        await self._store.begin_upload(uploading, owner=_DEAD, lease=_LEASE_SECONDS)
        await self._objects.put(uploading.object_key, b"half of an uplo")
        overdue = await self._upload(data, filename="overdue.jsonl", expires_after=1)
        gone = (deleted, expired, abandoned, uploading, overdue)
        self.expected["gone"] += [file.id for file in gone]

    def _file(self, name: str) -> File:
        file_id = ids.file_id(SystemRandom().bytes(16))
        return File(
            id=file_id,
            project_id=self._owner.project_id,
            filename=f"{name}.jsonl",
            purpose="batch",
            bytes=0,
            created_at=self._now,
            expires_at=self._now + 30 * _DAY_SECONDS,
            is_error=False,
            object_key=f"uploads/{file_id}",
        )

    async def _upload(self, data: bytes, *, filename: str | None = None, expires_after: int | None = None) -> File:
        async with self._services.upload.begin(self._owner.project_id) as incoming:
            await incoming.write(data)
            return await incoming.finish(filename=filename, expires_after=expires_after)

    async def _create(
        self,
        name: str,
        prompts: Sequence[str],
        *,
        ends: str,
        account: str = "alpha",
        idempotency_key: str | None = None,
        invalid: bool = False,
    ) -> Batch:
        """Create a batch that must be in the state ``ends`` after the next version has run."""
        data = chat_lines(prompts) + (b"no JSON\n" if invalid else b"")
        file = await self._upload(data)
        answer = await self._services.creator.create(
            self._owners[account],
            CreateRequest(input_file_id=file.id, endpoint=CHAT, metadata=json.dumps({"name": name}).encode()),
            idempotency_key=idempotency_key,
            retried=False,
            admit=lambda: None,
        )
        await self._services.creator.mark_answered(answer.batch_id)
        self._expect(name, answer.batch_id, len(prompts), ends=ends)
        return await self._seen(answer.batch_id)

    def _expect(self, name: str, batch_id: str, lines: int, *, ends: str) -> None:
        self.expected["batches"].append({"name": name, "id": batch_id, "lines": lines, "ends": ends})

    async def _seen(self, batch_id: str) -> Batch:
        batch = await self._store.batch(self._owner.project_id, batch_id)
        assert batch is not None
        return batch

    async def _ended_by_the_engine(self) -> None:
        """Run batches to their end with the whole engine, which also deletes their work."""
        running = asyncio.create_task(self._engine.run())
        prompts = [f"line {n}" for n in range(20)] + ["[[status=400]]", "[[status=404]] naïve"]
        batches = [
            await self._create("completed", prompts, ends="completed", idempotency_key="once"),
            await self._create("failed", ["fine"], ends="failed", invalid=True),
        ]
        cancelled = await self._create("cancelled", ["[[delay=1]]"] * 60, ends="cancelled")
        await self._services.cancellation.cancel(cancelled.project_id, cancelled.id)
        batches.append(cancelled)
        for batch in batches:
            while (  # noqa: ASYNC110 - the store has no event to wait for
                await self._seen(batch.id)
            ).status not in TERMINAL or await self._store.prunable(retention=0, limit=1):
                await asyncio.sleep(0.05)
        self._engine.stop()
        await running
        completed = await self._seen(batches[0].id)
        for file_id in (completed.output_file_id, completed.error_file_id):
            await self._note_content(file_id)

    async def _note_content(self, file_id: str | None) -> None:
        assert file_id is not None
        file = await self._store.file(self._owner.project_id, file_id, at=self._now)
        assert file is not None
        data = await self._objects.read(file.object_key, 0, file.bytes)
        self.expected["files"][file.id] = {"sha256": sha256(data).hexdigest(), "filename": file.filename}

    async def _ended_with_work(self) -> None:
        """End batches whose work is not deleted yet: one by its results, one that never had any lines."""
        await self._create("completed, with work", ["a", "b", "c"], ends="completed")
        await self._record_all(await self._claim())
        await self._finalize()
        expired = await self._create("expired", ["never run"] * 10, ends="expired")
        await self._expire(expired)
        await self._finalize()
        early = await self._validating("cancelled while validating", ends="cancelled", lines=0)
        await self._store.cancel_batch(early.project_id, early.id, at=self._now)

    async def _finalizing(self) -> None:
        """Leave a batch to a finalizer that died, with a result that it had begun, and one more that was cancelled."""
        for name, ends in (("finalizing", "completed"), ("cancelled while finalizing", "cancelled")):
            batch = await self._create(name, [f"{name} {n}" for n in range(20)], ends=ends)
            await self._record_all(await self._claim(), inline=False)
            lease = await self._store.lease_finalizable(owner=_DEAD, lease=_LEASE_SECONDS, at=self._now)
            assert lease is not None
            await self._objects.put(f"results/{batch.id}/{lease.epoch}-output", b"half of a resu")
        await self._store.cancel_batch(batch.project_id, batch.id, at=self._now)

    async def _drained(self) -> None:
        await self._create("drained", ["one", "two"], ends="completed")
        await self._record_all(await self._claim())

    async def _cancelling(self) -> None:
        """Cancel a batch that has a done, a leased and a closed shard."""
        batch = await self._create("cancelling", [f"{n}" for n in range(24)], ends="cancelled")
        done, leased = await self._claim(lines=2 * _LINES_PER_SHARD)
        await self._record(done, range(done.lines))
        await self._record(leased, [1, 3])
        await self._store.cancel_batch(batch.project_id, batch.id, at=self._now)

    async def _expiring(self) -> None:
        """Stop a batch that is past its window while a shard is leased."""
        batch = await self._create("expiring", [f"{n}" for n in range(24)], ends="expired")
        [leased] = await self._claim(lines=_LINES_PER_SHARD)
        await self._record(leased, [0])
        await self._expire(batch)

    async def _half_run(self) -> None:
        """Leave shards in every state, of a batch whose input was deleted. Two segments are rows, one is an object."""
        batch = await self._create("half run", [f"half {n}" for n in range(64)], ends="completed")
        await self._store.delete_file(batch.project_id, batch.input_file_id, at=self._now)
        await self._objects.delete(f"uploads/{batch.input_file_id}")
        done, leased, struck = await self._claim(lines=3 * _LINES_PER_SHARD)
        await self._record(done, range(done.lines), failed=[2])
        await self._record(leased, [0, 5], inline=False)
        await self._record(struck, [7], failed=[7])
        # A lease that a segment was written under, but not recorded.
        await self._objects.put(f"segments/{batch.id}/{_DEAD}-99", b"no row names this object")

    async def _struck(self) -> None:
        """Leave shards that a process died on: they are split, and each part has a strike."""
        await self._create("struck", [f"struck {n}" for n in range(16)], ends="completed")
        await self._claim(owner="another-process-that-was-killed", lease=2.0)
        while not await self._store.rescue(live_owners=lambda: [_DEAD]):
            await asyncio.sleep(0.2)
            await self._store.watch_leases(owner=_DEAD, lease=_LEASE_SECONDS)

    async def _open(self) -> None:
        account = "revoked while its batch runs"
        await self._create("revoked key", ["not run"] * 9, ends="completed", account=account)
        await self._store.revoke_key(self._owners[account].key_id, at=self._now)
        await self._create("open", [f"open {n} \u2028 \U0001f600" for n in range(20)], ends="completed")

    async def _validating(self, name: str = "validating", *, ends: str = "failed", lines: int = 5) -> Batch:
        """Leave a batch that a process validates, with a work file that it has not finished."""
        batch = Batch(
            id=ids.batch_id(self._now, SystemRandom().bytes(10)),
            project_id=self._owner.project_id,
            key_id=self._owner.key_id,
            endpoint=CHAT,
            input_file_id=(await self._upload(chat_lines(["x"] * lines) or b"\n")).id,
            metadata=b"{}",
            status="validating",  # type: ignore[arg-type]  # the value of the enumeration
            created_at=self._now,
            expires_at=self._now + _DAY_SECONDS,
            epoch=1,
        )
        new = NewBatch(batch=batch, digest=name.encode())
        assert await self._store.begin_batch(new, owner=_DEAD, lease=_LEASE_SECONDS, since=0) is None
        self._expect(name, batch.id, lines, ends=ends)
        if lines:
            await self._objects.put(f"work/{batch.id}/1", b"half of a work fi")
        return batch

    async def _claim(self, *, lines: int = 1000, owner: str = _DEAD, lease: float = _LEASE_SECONDS) -> list[Shard]:
        claim = await self._store.claim(owner=owner, lease=lease, lines=lines, bytes=1 << 30, alone=True, at=self._now)
        return claim.shards

    async def _expire(self, batch: Batch) -> None:
        await self._let_end("batches", batch.id)
        assert await self._store.expire() == [batch.id]

    async def _let_end(self, table: str, row_id: str) -> None:
        """Let the time of a row end when it began, since the clock that decides cannot be moved."""
        sql, url = f"UPDATE {table} SET expires_at = created_at WHERE id = $1", self._context.settings.database_url
        if url is None:
            with closing(sqlite3.connect(self._context.settings.data_dir / "batchline.sqlite")) as database, database:
                database.execute(sql, (row_id,))
            return
        connection = await asyncpg.connect(url.get_secret_value())
        await connection.execute(sql, row_id)
        await connection.close()

    async def _finalize(self) -> None:
        damage_log = self._context.damage_log
        finalizer = Finalizer(
            store=self._store,
            objects=self._objects,
            repair=Repair(
                store=self._store,
                objects=self._objects,
                validator=self._validator,
                damage_log=damage_log,
                clock=self._context.clock,
            ),
            reuse_step=ReuseStep(
                store=self._store,
                objects=self._objects,
                validator=self._validator,
                catalog=self._context.settings.catalog,
                tariff=self._context.settings.tariff,
                clock=self._context.clock,
                metrics=self._context.metrics,
                max_age_seconds=0,
                max_lines=0,
            ),
            damage_log=damage_log,
            clock=self._context.clock,
            random=self._context.random,
            owner=_DEAD,
            lease_seconds=_LEASE_SECONDS,
            retention_seconds=self._context.settings.file_retention_seconds,
            batch_ends=BatchEnds(metrics=self._context.metrics, tracer=None),
            on_batch_ended=lambda: None,
            on_work_available=lambda: None,
        )
        await finalizer.step()

    async def _record_all(self, shards: Sequence[Shard], *, inline: bool = True) -> None:
        for shard in shards:
            await self._record(shard, unsettled(shard.settled, shard.lines), inline=inline)

    async def _record(
        self, shard: Shard, positions: Sequence[int], *, failed: Sequence[int] = (), inline: bool = True
    ) -> None:
        """Record lines of a shard as the recorder does: the bytes first, then one transaction."""
        data = await self._objects.read(f"work/{shard.batch_id}/1", shard.offset, shard.length)
        lines = list(decode_lines(data))
        output = b"".join(_output(shard, lines[n]) for n in positions if n not in failed)
        errors = b"".join(_error(shard, lines[n]) for n in failed)
        _, progress = moved_on(shard, positions, failed=len(failed))
        await self._store.record(
            shard.batch_id,
            owner=_DEAD,
            progress=[progress],
            segment=await self._segment(shard, output, errors, inline=inline),
            errors=[_line_errors(lines[n]) for n in failed[:1]],
            charges=[_charge(len(positions) - len(failed))],
            at=self._now,
        )

    async def _segment(self, shard: Shard, output: bytes, errors: bytes, *, inline: bool) -> Segment:
        sizes: dict[str, Any] = {"output_bytes": len(output), "error_bytes": len(errors)}
        if inline:
            return Segment(**sizes, data=output + errors)
        self._segments += 1
        key = f"segments/{shard.batch_id}/{_DEAD}-{self._segments}"
        await self._objects.put(key, output + errors)
        return Segment(**sizes, object_key=key)


def _output(shard: Shard, line: Line) -> bytes:
    body = b'{"choices":[{"message":{"content":"an answer of the former version"}}],"system_fingerprint":null}'
    return output_line(ids.line_id(shard.batch_id, line.index), line.custom_id, Success(200, "req_1", body))


def _error(shard: Shard, line: Line) -> bytes:
    return error_line(ids.line_id(shard.batch_id, line.index), line.custom_id, _BAD_LINE)


def _line_errors(line: Line) -> LineErrors:
    sample = json.dumps({"custom_id": json.loads(line.custom_id), "message": _BAD_LINE.message})
    return LineErrors(code=_BAD_LINE.code, count=1, sample=sample.encode())


def _charge(lines: int) -> Charge:
    return Charge(
        model="m", requests=lines, usage=Usage(input_tokens=3, output_tokens=4) if lines else Usage(), cost=700 * lines
    )


if __name__ == "__main__":
    make_all()
