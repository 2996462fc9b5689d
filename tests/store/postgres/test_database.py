"""Promises of the PostgreSQL store alone: outages, unclear commits, migrations, a pooler in between."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import pytest

from batchline.domain.errors import LeaseLost, StoreDown
from batchline.domain.fleet import Report
from batchline.store.postgres.database import PostgresDatabase
from batchline.store.postgres.migrate import await_version, migrate
from batchline.store.postgres.pool import ConnectionPool, connect
from batchline.store.postgres.queries import Query
from batchline.store.sql import Script, change, fenced, load_queries, one, rows
from batchline.system import SystemClock
from tests.support.clocks import SettableClock
from tests.support.postgres_proxy import wired
from tests.support.postgres_server import Postgres
from tests.support.postgres_store import opened
from tests.support.stores import LEASE, ME, NOW, OTHER, key

pytestmark = pytest.mark.anyio


def through(postgres: Postgres, url: str, port: int) -> str:
    """Return the URL of the same database by another port."""
    return postgres.url(url.rpartition("/")[2], port=port)


def test_both_dialects_have_the_same_queries() -> None:
    assert list(load_queries("batchline.store.postgres")) == list(load_queries("batchline.store.sqlite"))


async def test_a_commit_whose_answer_is_lost_counts_once(postgres: Postgres, postgres_url: str) -> None:
    """C12, D4: recording again after a commit whose reply was lost would record and charge twice."""
    async with wired(postgres.port) as wire, opened(through(postgres, postgres_url, wire.port)) as world:
        batch = await world.running(shards=[4])
        (shard,) = await world.claim()
        fates = iter(["lose the answer"])
        wire.on_commit = lambda: next(fates, "carry")
        shard = await world.record(shard, [0, 1])
        assert wire.lost.is_set()
        assert (await world.seen(batch)).completed == 2
        await world.record(shard, [2, 3])
        assert (await world.finish()).batch.completed == 4
        assert len(await world.store.segments(batch.id, after=0, limit=9)) == 2


async def test_a_commit_that_was_lost_never_happened(postgres: Postgres, postgres_url: str) -> None:
    """C12: StoreDown means that nothing was committed, now or later.

    The server does not keep the locks of a transaction whose client vanished either.
    """
    async with (
        wired(postgres.port) as wire,
        opened(through(postgres, postgres_url, wire.port), idle_timeout_seconds=1.5) as world,
    ):
        batch = await world.running(shards=[4])
        (shard,) = await world.claim()
        fates = iter(["lose it"])
        wire.on_commit = lambda: next(fates, "carry")
        with pytest.raises(StoreDown):
            await world.record(shard, [0, 1])
        assert (await world.seen(batch)).completed == 0
        await world.record(shard, [0, 1, 2, 3])
        assert (await world.finish()).batch.completed == 4


async def test_an_unclear_commit_is_cleared_up_once_the_server_is_back(postgres: Postgres, postgres_url: str) -> None:
    """C7: however long the server is unavailable, the caller gets neither a success nor a failure before."""
    async with (
        wired(postgres.port) as wire,
        opened(through(postgres, postgres_url, wire.port), connect_timeout_seconds=1) as world,
    ):
        await world.store.check()
        wire.on_commit = lambda: "lose the answer"
        writing = asyncio.create_task(world.owner())
        wire.silent_from_now_on = True
        await wire.asked_in_vain(times=2)
        assert not writing.done()
        wire.on_commit = lambda: "carry"
        wire.silent_from_now_on = False
        owner = await writing
        assert [one.id for one in await world.store.keys()] == [owner.key_id]


async def test_a_network_that_is_cut_hangs_nobody(postgres: Postgres, postgres_url: str) -> None:
    """F5: a caller whose reply never comes gets an error in bounded time; afterwards the store works as before."""
    async with (
        wired(postgres.port) as wire,
        opened(through(postgres, postgres_url, wire.port), transaction_timeout_seconds=1) as world,
    ):
        await world.store.check()
        wire.silent = True
        with pytest.raises(StoreDown):
            await world.store.keys()
        wire.silent = False
        await world.store.check()


async def test_connections_that_were_closed_meanwhile_are_replaced(postgres_url: str) -> None:
    """B2: a restart of the server while no transaction runs causes no error."""
    async with opened(postgres_url) as world:
        await asyncio.gather(*(world.store.check() for _ in range(4)))
        await world.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        owner = await world.owner()
        assert [one.id for one in await world.store.keys()] == [owner.key_id]


async def test_a_connection_that_was_left_in_the_middle_is_not_lent_again(postgres_url: str) -> None:
    """F5: if a task is cancelled while its statement runs, the late reply must not reach the next transaction."""
    async with pool_of(postgres_url, size=1) as pool:
        sleeping, pids = asyncio.Event(), []

        async def sleep() -> None:
            async with pool.acquire() as connection:
                pids.append(await connection.fetchval("SELECT pg_backend_pid()"))
                sleeping.set()
                await connection.execute("SELECT pg_sleep(60)")

        cancelled = asyncio.create_task(sleep())
        await sleeping.wait()
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        async with pool.acquire() as connection:
            assert await connection.fetchval("SELECT pg_backend_pid()") not in pids


async def test_a_connection_that_is_left_in_a_transaction_is_not_lent_again(postgres_url: str) -> None:
    """A transaction that was neither committed nor rolled back must not swallow the next one."""
    async with pool_of(postgres_url, size=1) as pool:
        async with pool.acquire() as connection:
            await connection.execute("BEGIN")
            pid = await connection.fetchval("SELECT pg_backend_pid()")
        async with pool.acquire() as connection:
            assert not connection.is_in_transaction()
            assert await connection.fetchval("SELECT pg_backend_pid()") != pid


async def test_a_connection_is_kept_and_lent_again_without_a_reset(postgres: Postgres, postgres_url: str) -> None:
    """No transaction pays for a new connection, nor for a round trip between two transactions."""
    async with pool_of(postgres_url, size=2) as pool:
        async with pool.acquire() as connection:
            pid = await connection.fetchval("SELECT pg_backend_pid()")
            await connection.execute("SET application_name = 'kept'")
        async with pool.acquire() as connection:
            assert await connection.fetchval("SELECT pg_backend_pid()") == pid
            assert await connection.fetchval("SHOW application_name") == "kept"


async def test_no_more_than_the_allowed_connections_are_lent_at_once(postgres_url: str) -> None:
    """F5: all machines share the server's limit; a later caller waits until a connection is free."""
    async with pool_of(postgres_url, size=2) as pool, pool.acquire(), pool.acquire() as second:
        third = asyncio.create_task(_backend_pid(pool))
        done, _ = await asyncio.wait([third], timeout=0.1)
        assert not done
        second.terminate()
        assert await third


async def test_a_pool_that_is_in_use_closes_in_bounded_time(postgres_url: str) -> None:
    """F5: a statement that hangs does not keep the process from stopping."""
    pool = await ConnectionPool.open(postgres_url, pooled=False, size=1, connect_timeout_seconds=1)
    async with pool.acquire():
        await pool.close()


async def _backend_pid(pool: ConnectionPool) -> int:
    async with pool.acquire() as connection:
        pid: int = await connection.fetchval("SELECT pg_backend_pid()")
        return pid


@asynccontextmanager
async def pool_of(url: str, *, size: int) -> AsyncIterator[ConnectionPool]:
    pool = await ConnectionPool.open(url, pooled=False, size=size)
    try:
        yield pool
    finally:
        await pool.close()


async def test_nobody_there_is_down() -> None:
    with pytest.raises(StoreDown):
        await PostgresDatabase.open("postgresql://postgres@127.0.0.1:1/none", pooled=False, size=1, clock=SystemClock())


async def test_a_server_that_does_not_answer_is_named_with_the_time_it_was_given(postgres: Postgres) -> None:
    """A timeout has no text of its own, so the message ended with a colon."""
    async with wired(postgres.port) as wire:
        wire.silent_from_now_on = True
        # If asyncpg is cancelled while it asks for TLS, it leaves a future behind whose exception nobody reads.
        url = postgres.url("postgres", port=wire.port) + "?sslmode=disable"
        with pytest.raises(StoreDown, match=r"no connection: the server did not answer within 0\.01 s"):
            await connect(url, timeout_seconds=0.01)


async def test_what_a_script_raises_undoes_it_and_the_connection_goes_on(postgres_url: str) -> None:
    """A violated constraint of the schema is raised as such, as every store does."""

    def lose() -> Script[None]:
        yield from change("insert_organization", organization_id="o", name="undone", at=1)
        yield from fenced("revoke_key", key_id="unknown", at=1)

    def break_a_rule() -> Script[int]:
        yield from change("insert_organization", organization_id="p", name="undone too", at=1)
        key = {"key_id": "k", "digest": b"", "hint": "", "name": "", "scopes": "", "at": 1, "expires_at": None}
        return (yield from change("insert_key", project_id="unknown", **key))

    async with opened(postgres_url, size=1) as world:
        database = world.database
        with pytest.raises(LeaseLost):
            await database.write(lose)
        with pytest.raises(asyncpg.IntegrityConstraintViolationError):
            await database.write(break_a_rule)
        with pytest.raises(StoreDown):
            await database.write(lambda: change("insert_organization", organization_id="n", name=object(), at=1))
        assert await world.store.organizations() == []
        await world.store.check()


async def test_scripts_that_wait_for_each_other_both_succeed(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL aborts one of the two, which is run again from its start."""
    async with opened(postgres_url) as world:
        first, second = await world.owner(organization="one"), await world.owner(organization="two")
        both_hold_one = asyncio.Barrier(2)
        runs: list[str] = []

        def crossing(mine: str, other: str) -> Script[None]:
            runs.append(mine)
            yield from one("lock_organization", organization_id=mine)
            for organization_id in (mine, other):
                yield from change("add_funds", organization_id=organization_id, balance=1, credits=0)

        database = world.database
        execute = database._execute

        async def meet(connection: Any, statement: Any) -> Any:
            result = await execute(connection, statement)
            if statement.name == "lock_organization" and len(runs) <= 2:
                await both_hold_one.wait()
            return result

        monkeypatch.setattr(database, "_execute", meet)
        ids = first.organization_id, second.organization_id
        await asyncio.gather(database.write(lambda: crossing(*ids)), database.write(lambda: crossing(*reversed(ids))))
        assert [found.balance for found in await world.store.organizations()] == [2, 2]
        assert len(runs) >= 3


async def test_any_text_comes_back_as_it_went_in(postgres_url: str) -> None:
    """B3, C5: PostgreSQL's text cannot hold NUL, and its indexes cannot hold long names."""
    async with opened(postgres_url) as world:
        owner = await world.owner()
        for text in ("a\0b", "\x10", "\x100\x101\0", "é\u2028" * 5000, "\0" * 3000):
            file = await world.stored(owner, filename=text)
            assert await world.store.file(owner.project_id, file.id, at=NOW) == file
            batch = await world.running(owner, model=text, endpoint=text, idempotency_key=text)
            assert (batch.model, batch.endpoint) == (text, text)
            created = await world.store.find_create(owner.project_id, text, since=0)
            assert created is not None
            assert created.batch_id == batch.id
            (shard,) = await world.claim()
            assert shard.model == text
            await world.record_all([shard])
        assert await world.store.batch(owner.project_id, "batch_\0") is None


async def test_an_outage_of_the_database_strikes_nobody(postgres_url: str) -> None:
    """D5: after an outage every worker has a whole lease of time to renew; those that do not are dead."""
    async with opened(postgres_url) as world:
        batch = await world.running(shards=[4])
        (shard,) = await world.claim(holder=OTHER)
        await world.execute(
            "UPDATE shards SET lease_until = lease_until - interval '1 hour'; "
            "UPDATE watch SET seen = seen - interval '1 hour', since = since - interval '1 hour'"
        )
        assert await world.rescue() == 0
        await world.pass_time(LEASE - 1)
        assert await world.rescue() == 0
        assert await world.store.renew_shards(owner=OTHER, lease=LEASE) == {key(shard)}
        await world.record(shard, [0])
        await world.pass_time(LEASE + 1)
        assert await world.rescue() == 1
        assert (await world.seen(batch)).completed == 1


async def test_a_clock_that_went_back_keeps_no_dead_worker_alive(postgres_url: str) -> None:
    """D5: leases end again a whole lease after the clock of the database was set back, however far it was ahead."""
    async with opened(postgres_url) as world:
        await world.rescue()
        await world.execute("UPDATE watch SET seen = seen + interval '1 hour', since = since + interval '1 hour'")
        await world.running(shards=[4])
        (shard,) = await world.claim(holder=OTHER)
        assert await world.rescue() == 0
        await world.pass_time(LEASE - 1)
        assert await world.store.renew_shards(owner=OTHER, lease=LEASE) == {key(shard)}
        await world.pass_time(LEASE + 1)
        assert await world.rescue() == 1


async def test_a_lease_of_a_clock_that_was_ahead_ends_as_any_other(postgres_url: str) -> None:
    """D5: a process that died while the clock of the database was ahead is taken over a lease after it was put right.

    One that is alive renews meanwhile, and keeps what it holds.
    """
    async with opened(postgres_url) as world:
        owner = await world.owner()
        await world.running(owner)
        await world.record_all(await world.claim())
        await world.finish(holder=OTHER)
        await world.running(owner)
        await world.claim(holder=OTHER)
        await world.running(owner)
        (held,) = await world.claim(holder="alive")
        await world.validating(owner, holder=OTHER)
        upload = world.file(owner)
        await world.store.begin_upload(upload, owner=OTHER, lease=LEASE)
        await world.store.heartbeat(Report(owner=OTHER, runs_batches=True), caps={}, lease=LEASE)
        await world.pass_time(-3600)
        await world.execute("UPDATE watch SET seen = seen + interval '1 hour'")

        async def taken_over() -> tuple[int, int, list[str], bool, int]:
            return (
                await world.rescue(),
                len(await world.store.fail_interrupted(owner=ME, errors=b"[]", answer=b"{}", at=NOW)),
                await world.expire_files(owner=ME, at=NOW, limit=9),
                await world.store.lease_finalizable(owner=ME, lease=LEASE, at=NOW) is not None,
                len(await world.store.reports()),
            )

        assert await taken_over() == (0, 0, [], False, 1)
        await world.pass_time(LEASE - 1)
        assert await world.store.renew_shards(owner="alive", lease=LEASE) == {key(held)}
        assert await taken_over() == (0, 0, [], False, 1)
        await world.pass_time(2)
        assert await taken_over() == (1, 1, [upload.object_key], True, 0)


async def test_a_wait_of_a_clock_that_was_ahead_ends_as_any_other(postgres_url: str) -> None:
    """D5: a batch that could not be finalized is tried again within a minute after the clock was put right."""
    async with opened(postgres_url) as world:
        await world.running()
        await world.record_all(await world.claim())
        await world.store.defer_finalize(await world.finish(), seconds=60)
        await world.rescue()
        await world.pass_time(59)
        assert await world.store.lease_finalizable(owner=OTHER, lease=LEASE, at=NOW) is None, "it waits for a minute"
        await world.pass_time(-3600)
        await world.rescue()
        await world.pass_time(61)
        assert await world.store.lease_finalizable(owner=OTHER, lease=LEASE, at=NOW) is not None


async def test_everything_goes_through_a_pooler_that_keeps_no_state(postgres_url: str) -> None:
    """Each transaction may run on another server connection, so none depends on a connection's state."""
    async with opened(postgres_url, pooled=True) as world:
        batch = await world.running(shards=[2, 2])
        await world.record_all(await world.claim())
        await world.publish(await world.finish())
        assert (await world.seen(batch)).status == "completed"
        async with world.database._pool.acquire() as connection:
            assert await connection.fetchval("SELECT count(*) FROM pg_prepared_statements") == 0


def test_processes_that_start_at_once_migrate_once(postgres: Postgres) -> None:
    """F1: several machines may run ``serve`` on a new database at once."""
    url = postgres.new_database(empty=True)

    async def start() -> None:
        await asyncio.gather(*(migrate(url) for _ in range(6)))
        async with opened(url) as world:
            await world.store.check()

    asyncio.run(start())


def test_a_database_of_another_version_is_refused(postgres: Postgres) -> None:
    """An older program must not use a newer schema; an older schema is refused with the remedy."""
    url = postgres.new_database(empty=True)

    async def refusal(version: int | None) -> str:
        if version is not None:
            connection = await asyncpg.connect(url)
            await connection.execute("UPDATE schema_version SET version = $1", version)
            await connection.close()
        with pytest.raises(StoreDown) as raised:
            async with opened(url):
                pass
        return str(raised.value)

    async def play() -> None:
        assert "batchline migrate" in await refusal(None)
        await migrate(url)
        assert "batchline migrate" in await refusal(0)
        assert "newer" in await refusal(99)
        with pytest.raises(StoreDown, match="newer"):
            await migrate(url)

    asyncio.run(play())


class _MigratingClock(SettableClock):
    """Runs the migration of another process while the second look is waited for."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url, self.sleeps = url, 0

    async def sleep(self, seconds: float) -> None:
        self.sleeps += 1
        if self.sleeps == 2:
            await migrate(self._url)


@pytest.mark.rule("F1", "migrate --wait changes nothing, and ends when another process has migrated the database.")
def test_a_process_can_wait_for_the_migration_of_another(postgres: Postgres) -> None:
    url, reasons = postgres.new_database(empty=True), list[str]()
    clock = _MigratingClock(url)

    async def play() -> None:
        await await_version(url, clock=clock, on_wait=reasons.append)
        assert clock.sleeps == 2
        connection = await asyncpg.connect(url)
        await connection.execute("UPDATE schema_version SET version = 99")
        await connection.close()
        with pytest.raises(StoreDown, match="newer"):
            await await_version(url, clock=clock, on_wait=reasons.append)

    asyncio.run(play())
    assert len(reasons) == 2
    assert all("run batchline migrate" in reason for reason in reasons)


class _Waiting(Exception):
    """The clock was asked to wait."""


class _EndingClock(SettableClock):
    async def sleep(self, seconds: float) -> None:
        raise _Waiting


async def test_a_server_that_does_not_answer_yet_is_waited_for() -> None:
    reasons: list[str] = []
    with pytest.raises(_Waiting):
        await await_version("postgresql://user@127.0.0.1:9/name", clock=_EndingClock(), on_wait=reasons.append)
    assert len(reasons) == 1


async def test_a_lane_below_the_floor_of_a_restored_database_is_found(postgres_url: str) -> None:
    """A dump holds the floor as it was later than the rows, so open lanes may be below it."""
    async with opened(postgres_url) as world:
        await world.running(shards=[4])
        await world.execute("SELECT setval('lane_floor', 1000)")
        assert await world.claim() == []
    async with opened(postgres_url) as world:
        assert len(await world.claim()) == 1


async def test_the_lanes_of_a_project_without_open_shards_are_deleted_when_a_batch_ends(postgres_url: str) -> None:
    """Else they would grow with every name of a model that a client ever used. Those with open shards stay."""
    async with opened(postgres_url) as world:
        owner = await world.owner()
        await world.running(owner, shards=[1], model="mine")
        await world.record_all(await world.claim())
        await world.running(owner, shards=[1], model="waits")
        await world.running(await world.owner("beta"), shards=[1], model="of another")
        await world.publish(await world.finish())
        assert await world.fetch("SELECT string_agg(model, ', ' ORDER BY model) FROM lanes") == "of another, waits"


@pytest.mark.rule("C7", "Commits are durable when they are reported, even if PostgreSQL is set to report them early.")
async def test_synchronous_commit_is_on_whatever_the_server_is_set_to(postgres_url: str) -> None:
    """C7, C12: with synchronous_commit=off, a crash of PostgreSQL would lose what clients were told is stored."""
    async with opened(postgres_url) as world:
        await world.execute(f"ALTER DATABASE {postgres_url.rpartition('/')[2]} SET synchronous_commit = off")
    async with opened(postgres_url) as world:
        assert await world.fetch("SHOW synchronous_commit") == "off"
        world.database._queries["durability"] = Query("SHOW synchronous_commit", ())
        found = await world.database.write(lambda: rows("durability"))
        assert [dict(row) for row in found] == [{"synchronous_commit": "on"}]
