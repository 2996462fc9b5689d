"""Races of many machines on PostgreSQL, each held open at its worst moment: rules C10 to C12, D5, D8, F2."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from batchline.domain.records import Charge, Shard
from batchline.domain.states import BatchStatus
from batchline.domain.usage import NOTHING
from batchline.store.postgres.pool import connect
from batchline.store.sql import Result, Statement
from tests.support.postgres_store import Opened, opened
from tests.support.stores import LEASE, ME, NOW, OTHER, moved_on, segment

pytestmark = pytest.mark.anyio

T = TypeVar("T")
_HEADWAY_SECONDS = 0.3
"""The time for work that may proceed meanwhile. Work that has to wait does not end in any time."""
_COUNT_WAITING = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


class Held:
    """Holds the first transaction that runs a statement, after the statement and before the commit."""

    def __init__(self, world: Opened, name: str) -> None:
        self._name, self._go_on = name, asyncio.Event()
        self._execute = world.database._execute
        self.reached = asyncio.Event()

    async def execute(self, connection: Any, statement: Statement) -> Result:
        result = await self._execute(connection, statement)
        if statement.name == self._name and not self.reached.is_set():
            self.reached.set()
            await self._go_on.wait()
        return result

    async def meanwhile(self, other: Awaitable[T]) -> T:
        """Try other work at that moment; then let both proceed."""
        await self.reached.wait()
        trying = asyncio.ensure_future(other)
        await asyncio.wait({trying}, timeout=_HEADWAY_SECONDS)
        self._go_on.set()
        return await trying


class Waits:
    """Counts how often each statement ran, and tells when transactions wait for locks."""

    def __init__(self, world: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
        self._world, self._execute = world, world.database._execute
        self.runs = Counter[str]()
        monkeypatch.setattr(world.database, "_execute", self._count)

    async def until(self, transactions: int) -> None:
        """Return once so many transactions wait for a lock."""
        waiting = 0
        while waiting < transactions:
            waiting = await self._world.fetch(_COUNT_WAITING)

    async def _count(self, connection: Any, statement: Statement) -> Result:
        self.runs[statement.name] += 1
        return await self._execute(connection, statement)


@asynccontextmanager
async def held_after(world: Opened, name: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Held]:
    held = Held(world, name)
    monkeypatch.setattr(world.database, "_execute", held.execute)
    yield held


async def test_the_last_two_shards_that_end_at_once_end_the_batch(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12: neither sees the other's last line before the commit, yet one of them must mark the batch as drained."""
    async with opened(postgres_url) as world:
        await world.running(shards=[1, 1])
        first, second = await world.claim()
        async with held_after(world, "add_sample", monkeypatch) as held:
            await asyncio.gather(world.record_all([first]), held.meanwhile(world.record_all([second])))
        assert (await world.finish()).batch.completed == 2


async def test_what_is_handed_back_during_a_cancel_never_runs(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C10: the shard becomes open in a transaction that the cancel cannot see yet."""
    async with opened(postgres_url) as world:
        batch = await world.running(shards=[2])
        (shard,) = await world.claim()
        async with held_after(world, "release_shard", monkeypatch) as held:
            await asyncio.gather(
                world.store.release(batch.id, owner=ME, shards=[(shard.n, shard.epoch)]),
                held.meanwhile(world.store.cancel_batch(batch.project_id, batch.id, at=NOW)),
            )
        assert await world.claim() == []
        assert len((await world.finish()).leftovers) == 1


async def test_what_is_rescued_during_a_cancel_never_runs(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C11: the pieces are inserted in a transaction that the cancel cannot see yet."""
    async with opened(postgres_url) as world:
        batch = await world.running(shards=[4])
        await world.claim(holder=OTHER)
        await world.die(OTHER)
        async with held_after(world, "insert_shard", monkeypatch) as held:
            await asyncio.gather(
                world.rescue(),
                held.meanwhile(world.store.cancel_batch(batch.project_id, batch.id, at=NOW)),
            )
        assert await world.claim() == []
        assert len((await world.finish()).leftovers) == 4


async def test_the_order_is_deleted_if_both_result_files_are_deleted_at_once(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B8: neither delete sees the other before the commit, yet one of them must delete the order."""
    async with opened(postgres_url) as world:
        owner = await world.owner()
        batch = await world.ended(owner)
        output, error = [file_id or "" for file_id in (batch.output_file_id, batch.error_file_id)]
        async with held_after(world, "file", monkeypatch) as held:
            await asyncio.gather(
                world.store.delete_file(owner.project_id, error, at=NOW),
                held.meanwhile(world.store.delete_file(owner.project_id, output, at=NOW)),
            )
        found = await world.store.results(owner.project_id, batch.id, after=0, limit=9, at=NOW)
        assert found is not None
        assert found.order is None


async def test_a_batch_is_published_or_cancelled(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C10, C11: a batch whose cancel was confirmed never becomes completed."""
    async with opened(postgres_url) as world:
        batch = await world.running()
        await world.record_all(await world.claim())
        finish = await world.finish()
        async with held_after(world, "batch", monkeypatch) as held:
            published, cancelled = await asyncio.gather(
                world.publish(finish), held.meanwhile(world.store.cancel_batch(batch.project_id, batch.id, at=NOW))
            )
        assert cancelled == (await world.seen(batch), False)
        assert published == cancelled[0].status == BatchStatus.COMPLETED


async def test_no_file_appears_before_one_that_was_seen(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B5, C9b: a file with a lower number must not become visible later, or a reader would skip it."""
    async with opened(postgres_url) as world:
        owner = await world.owner()
        seen: list[str] = []

        async def read_on() -> None:
            after = seen[-1] if seen else None
            page = await world.store.files(owner.project_id, purpose=None, ascending=True, after=after, limit=9, at=NOW)
            seen.extend(file.id for file in page or [])

        async def store_another() -> str:
            other = await world.stored(owner)
            await read_on()
            return other.id

        async with held_after(world, "finish_upload", monkeypatch) as held:
            first, second = await asyncio.gather(world.stored(owner), held.meanwhile(store_another()))
        await read_on()
        assert seen == [first.id, second]


async def test_a_lane_that_opens_while_others_move_on_is_found(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D8: claims do not look below the floor, which must not be raised above a lane that is being opened."""
    async with opened(postgres_url) as world:
        busy, late = await world.owner("busy"), await world.owner("late")
        await world.running(busy, shards=[10] * 6)
        assert len(await world.claim(lines=10)) == 1

        async def work_on() -> None:
            for _ in range(4):
                assert await world.claim(lines=10)

        async with held_after(world, "open_lane", monkeypatch) as held:
            batch, _ = await asyncio.gather(world.running(late, shards=[10]), held.meanwhile(work_on()))
        found = set[str]()
        while shards := await world.claim():
            found |= {shard.batch_id for shard in shards}
        assert batch.id in found


async def test_the_floor_follows_the_lanes(postgres_url: str) -> None:
    """D8: the floor rises with the claims, or else each claim would cost more than the one before."""
    async with opened(postgres_url) as world:
        for name in ("alpha", "beta"):
            await world.running(await world.owner(name), shards=[10] * 10)
        for n in range(10):
            await world.claim(lines=20)
            assert await world.fetch("SELECT last_value FROM lane_floor") == 10 * n


async def test_an_organization_made_while_metering_starts_gets_its_credits(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F2: it read the free credits before they were set, and the transaction that grants them cannot see it."""
    async with opened(postgres_url) as world:
        async with held_after(world, "free_credits", monkeypatch) as held:
            await asyncio.gather(world.owner(), held.meanwhile(world.store.start_metering(5, at=NOW)))
        assert [found.credits for found in await world.store.organizations()] == [5]


async def test_only_the_databases_clock_ends_a_lease(postgres_url: str) -> None:
    """C6, D5: a process must not be taken for dead only because another one looks for dead processes."""
    async with opened(postgres_url) as world:
        await world.pass_time(10 * LEASE)
        owner = await world.owner()
        finishing = await world.running(owner)
        await world.record_all(await world.claim())
        await world.finish(holder=OTHER)
        await world.running(owner)
        (shard,) = await world.claim(holder=OTHER)
        validating = await world.validating(owner, holder=OTHER)
        upload = world.file(owner)
        await world.store.begin_upload(upload, owner=OTHER, lease=LEASE)

        async def taken_over() -> tuple[int, int, list[str], bool]:
            return (
                await world.rescue(),
                len(await world.store.fail_interrupted(owner=ME, errors=b"[]", answer=b"{}", at=NOW)),
                await world.expire_files(owner=ME, at=NOW, limit=9),
                await world.store.lease_finalizable(owner=ME, lease=LEASE, at=NOW) is not None,
            )

        await world.pass_time(LEASE - 5)
        assert await taken_over() == (0, 0, [], False)
        await world.record(shard, [0])
        await world.pass_time(6)
        assert await taken_over() == (1, 1, [upload.object_key], True)
        assert (await world.seen(validating)).status == "failed"
        assert (await world.seen(finishing)).status == "finalizing"


async def test_records_of_one_organization_and_a_grant_at_once_all_count(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D4, F3: a balance that was set is that value minus later charges."""
    async with opened(postgres_url) as world:
        owner = await world.owner()
        set_funds = world.store.set_funds(owner.organization_id, balance=100, credits=None, at=NOW)
        charge = Charge(model="m", requests=1, usage=NOTHING, cost=7)
        async with held_after(world, "lock_organization", monkeypatch) as held:
            await asyncio.gather(set_funds, held.meanwhile(world.store.charge(owner, charge, at=NOW)))
        (organization,) = await world.store.organizations()
        entries = await world.store.entries(owner.organization_id)
        assert organization.balance == sum(entry.balance for entry in entries) == 93


async def test_a_key_for_an_organization_that_is_being_deleted_gets_a_new_one(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F3: the create has found the organization, and must leave no project in it."""
    async with opened(postgres_url) as world:
        first = await world.owner("one", "org")
        await world.store.delete_project(first.project_id, at=NOW)
        async with held_after(world, "organization_by_name", monkeypatch) as held:
            second, _ = await asyncio.gather(
                world.owner("two", "org"),
                held.meanwhile(world.store.delete_organization(first.organization_id, at=NOW)),
            )
        assert second.organization_id != first.organization_id
        [project] = await world.store.projects()
        assert (project.id, project.organization_id) == (second.project_id, second.organization_id)


@pytest.mark.parametrize("kind", ["organization", "project"])
async def test_a_name_that_is_given_up_while_a_key_is_created_is_taken(
    kind: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F3: the name was taken when the create tried to insert it, and is free when the create looks for its owner."""
    async with opened(postgres_url) as world:
        first = await world.owner("one", "org")
        if kind == "organization":
            await world.store.delete_project(first.project_id, at=NOW)
            deletion = world.store.delete_organization(first.organization_id, at=NOW)
        else:
            deletion = world.store.delete_project(first.project_id, at=NOW)
        async with held_after(world, f"insert_{kind}", monkeypatch) as held:
            second, deleted = await asyncio.gather(world.owner("one", "org"), held.meanwhile(deletion))
        assert deleted.is_done
        assert second.project_id != first.project_id
        [project] = await world.store.projects()
        assert (project.id, project.organization_id) == (second.project_id, second.organization_id)


async def test_a_record_and_a_renewal_do_not_wait_for_each_other(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12: both lock shards in the order of their numbers, however rows lie on the disk and lines were answered."""
    async with opened(postgres_url) as world:
        batch = await world.running(shards=[2, 2])
        first, second = await _both_shards(world)
        # Its row is behind that of the second one afterwards.
        await world.store.release(batch.id, owner=ME, shards=[(first.n, first.epoch)])
        (first,) = await world.claim()
        progress = [moved_on(shard, [0])[1] for shard in (second, first)]
        waits = Waits(world, monkeypatch)
        async with asyncio.TaskGroup() as group, _locked(postgres_url, f"SELECT 1 FROM shards WHERE n = {first.n}"):
            renewal = group.create_task(world.store.renew_shards(owner=ME, lease=LEASE))
            await waits.until(1)
            group.create_task(world.store.record(batch.id, owner=ME, progress=progress, segment=segment(2), at=NOW))
            await waits.until(2)
        assert len(renewal.result()) == 2
        assert waits.runs["advance_shard"] == waits.runs["renew_shards"] == 1, "the server ended a deadlock"


async def test_a_release_a_record_and_a_renewal_do_not_wait_for_each_other(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12: a release locks its shards before their batch, as a record does."""
    async with opened(postgres_url) as world:
        batch = await world.running(shards=[2, 2])
        first, second = await _both_shards(world)
        waits = Waits(world, monkeypatch)
        async with asyncio.TaskGroup() as group, _locked(postgres_url, "SELECT 1 FROM batches"):
            group.create_task(world.store.release(batch.id, owner=ME, shards=[(first.n, first.epoch)]))
            await waits.until(1)
            group.create_task(world.record(second, [0]))
            await waits.until(2)
            group.create_task(world.store.renew_shards(owner=ME, lease=LEASE))
            await waits.until(3)
        assert (await world.seen(batch)).completed == 1
        names = ("release_shard", "advance_shard", "renew_shards")
        assert [waits.runs[name] for name in names] == [1, 1, 1], "the server ended a deadlock"


async def _both_shards(world: Opened) -> list[Shard]:
    return sorted(await world.claim(), key=lambda shard: shard.n)


@asynccontextmanager
async def _locked(url: str, rows: str) -> AsyncIterator[None]:
    """Keep rows locked, on a connection of its own."""
    connection: Any = await connect(url)
    async with connection.transaction():
        await connection.execute(f"{rows} FOR UPDATE")
        yield
    await connection.close()
