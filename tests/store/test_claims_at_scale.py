"""Claims and records among very many shards on PostgreSQL, while an old snapshot keeps all dead row versions."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from statistics import median, quantiles
from typing import NamedTuple

import asyncpg  # type: ignore[import-untyped]
import pytest

from batchline.domain.records import Shard
from batchline.store.shards import advance_params
from batchline.store.sql import fenced_many
from tests.support.postgres_server import Postgres, running_postgres
from tests.support.postgres_store import Opened, opened
from tests.support.stores import LEASE, ME, NOW, moved_on

BATCHES = 5
SHARDS = 200
LINES = 8


class Times(NamedTuple):
    """The seconds that each claim and each record took."""

    claims: list[float]
    records: list[float]


@pytest.mark.proof
def test_neither_claims_nor_records_slow_down_while_an_old_snapshot_is_open(postgres: Postgres) -> None:
    """D8: a backup, or a forgotten transaction, keeps every dead version of a row for hours. What costs the more the
    more of them there are would stop all workers in the end."""
    for name, times in asyncio.run(_turn_over(postgres.new_database(), projects=10))._asdict().items():
        first, last = _first_and_last(times)
        assert last < 2.5 * first, name


@pytest.mark.proof
def test_claims_stay_quick_while_a_million_shards_turn_over() -> None:
    """D8: with 1,000,000 open shards of 1,000 projects, claims and records take as long at the end as at the beginning,
    though another transaction is open all along, so that no version of a row that was dead is ever removed. Every shard
    is claimed once, and no project is ahead of another. How long they take is printed."""
    with running_postgres("shared_buffers=1GB", "max_wal_size=8GB", durable=True) as server:
        measured = asyncio.run(_turn_over(server.new_database(), projects=1000))
    for name, times in measured._asdict().items():
        first, last = _first_and_last(times)
        p99 = quantiles(times, n=100)[98]
        print(
            f"{len(times)} {name}: median {median(times) * 1e3:.2f} ms, p99 {p99 * 1e3:.2f} ms, "
            f"in the first tenth usually {first * 1e3:.2f} ms, in the last {last * 1e3:.2f} ms"
        )
        assert last < 1.5 * first


def _first_and_last(times: list[float]) -> tuple[float, float]:
    """Return the times within which a quarter of the first and of the last tenth ended.

    Another load of the machine delays most of a tenth, if it comes at its time. What depends on the number of dead
    versions delays all of it.
    """
    tenth = len(times) // 10
    return quantiles(times[:tenth], n=4)[0], quantiles(times[-tenth:], n=4)[0]


async def _turn_over(url: str, *, projects: int) -> Times:
    reader = await asyncpg.connect(url)
    await reader.execute(_fill(projects))
    await reader.execute("VACUUM ANALYZE")
    await reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
    total = await reader.fetchval("SELECT count(*) FROM shards")
    times = Times([], [])
    shares: Counter[str] = Counter()
    async with opened(url) as world:
        while shards := await _claim(world, times.claims):
            shares.update(shard.batch_id.split("_")[1] for shard in shards)
            await _end(world, shards, times.records)
    assert await reader.fetchval("SELECT count(*) FROM shards WHERE state = 'open'") == total
    await reader.close()
    assert set(shares.values()) == {BATCHES * SHARDS}
    return times


async def _claim(world: Opened, times: list[float]) -> Sequence[Shard]:
    since = time.perf_counter()
    claim = await world.store.claim(owner=ME, lease=LEASE, lines=256, bytes=1 << 30, alone=True, at=NOW)
    times.append(time.perf_counter() - since)
    return claim.shards


async def _end(world: Opened, shards: Sequence[Shard], times: list[float]) -> None:
    """Record all of them in one transaction, as if they were of one batch."""
    since = time.perf_counter()
    ended = [advance_params(shard.batch_id, ME, moved_on(shard, range(shard.lines))[1]) for shard in shards]
    await world.database.write(lambda: fenced_many("advance_shard", ended))
    times.append(time.perf_counter() - since)


def _fill(projects: int) -> str:
    return f"""
INSERT INTO organizations (id, name, created_at) VALUES ('o', 'o', 0);
INSERT INTO projects (id, organization_id, name, created_at)
SELECT 'p' || p, 'o', 'p' || p, 0 FROM generate_series(1, {projects}) AS p;
INSERT INTO keys (id, project_id, digest, hint, created_at)
SELECT 'k' || p, 'p' || p, ('k' || p)::bytea, '', 0 FROM generate_series(1, {projects}) AS p;
INSERT INTO batches (id, project_id, key_id, endpoint, input_file_id, metadata, status, created_at, expires_at, epoch,
    digest, work_key, in_progress_at, total)
SELECT 'batch_' || p || '_' || b, 'p' || p, 'k' || p, '/', 'f', '{{}}', 'in_progress', 0, {NOW} + 86400 + b, 1,
    '', 'w', 0, {SHARDS * LINES}
FROM generate_series(1, {projects}) AS p, generate_series(1, {BATCHES}) AS b;
INSERT INTO shards (batch_id, n, project_id, "offset", length, lines, model, expires_at, settled)
SELECT 'batch_' || p || '_' || b, n, 'p' || p, n * 800, 800, {LINES}, 'm', {NOW} + 86400 + b, '\\x00'
FROM generate_series(1, {BATCHES}) AS b, generate_series(1, {projects}) AS p, generate_series(1, {SHARDS}) AS n;
INSERT INTO lanes (project_id, model, virtual_time, next_expires_at, next_batch_id, next_n, open)
SELECT 'p' || p, 'm', 0, 0, '', 0, TRUE FROM generate_series(1, {projects}) AS p;
"""
