"""What a restored service finds: everything but the leases, in every store. Rules C6, C11, C12, D4, D5, F3."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import pytest

from batchline.app.backends import open_both
from batchline.backup.postgres import TABLES
from batchline.cli.loading import load_settings
from batchline.domain.bitmap import unsettled
from batchline.domain.identity import Identity
from batchline.domain.records import Owner, Shard
from batchline.domain.states import BatchStatus
from batchline.ports import FinalizeLease, Store
from batchline.settings import Settings
from tests.support.busy_folder import ODD, Busy, Folder, world_on
from tests.support.postgres_server import Postgres
from tests.support.restore_targets import Target
from tests.support.stores import LEASE, ME, NOW

_DAY = 86_400


@pytest.fixture
def restored(target: Target, archive: Path) -> Target:
    result = target.restore(archive)
    assert result.exit_code == 0, result.output
    assert "Restored: 6 batches, 5 of them open; 3 files; " in result.stdout
    return target


def test_work_goes_on_where_it_was_without_a_strike(restored: Target, busy: Busy) -> None:
    """C12, D5: recorded lines stay recorded; leased shards are open under a new epoch, or closed if stopped.

    No worker has to wait for a lease to end.
    """

    async def claim(store: Store) -> list[Shard]:
        assert await store.rescue(live_owners=lambda: [ME]) == 0
        claim = await store.claim(owner=ME, lease=LEASE, lines=99, bytes=1 << 30, alone=True, at=NOW)
        return sorted(claim.shards, key=lambda shard: (shard.batch_id, shard.n))

    shards = restored.in_store(claim)
    half, whole, odd = shards
    assert [shard.batch_id for shard in shards] == [busy.batches[name] for name in ("half run", "half run", "open")]
    assert unsettled(half.settled, half.lines) == [0, 2, 3]
    assert (half.epoch, whole.epoch, odd.epoch) == (3, 3, 1)
    assert {shard.strikes for shard in shards} == {0}
    assert odd.model == ODD


def test_batches_that_were_put_together_or_stopped_can_be_finished_at_once(restored: Target, busy: Busy) -> None:
    """C10, C11: the old finalizer holds no lease, and a cancelled batch ends with the lines that never ran."""

    async def finish(store: Store) -> list[FinalizeLease]:
        found = [await store.lease_finalizable(owner=ME, lease=LEASE, at=NOW) for _ in range(3)]
        return [each for each in found if each is not None]

    finishes = {each.batch.id: each for each in restored.in_store(finish)}
    assert set(finishes) == {busy.batches["finalizing"], busy.batches["cancelled"]}
    assert finishes[busy.batches["finalizing"]].leftovers == []
    [left] = finishes[busy.batches["cancelled"]].leftovers
    assert unsettled(left.settled, left.lines) == [1, 2, 3]


def test_a_batch_that_was_being_validated_is_told_to_be_interrupted(restored: Target, busy: Busy) -> None:
    """C6: a batch that was being validated fails as interrupted."""

    async def fail_interrupted(store: Store) -> BatchStatus:
        assert len(await store.fail_interrupted(owner=ME, errors=b"{}", answer=b"{}", at=NOW)) == 1
        batch = await store.batch(busy.owner.project_id, busy.batches["validating"])
        assert batch is not None
        return batch.status

    assert restored.in_store(fail_interrupted) is BatchStatus.FAILED


def test_what_is_over_stays_over_and_its_work_is_forgotten(restored: Target, busy: Busy) -> None:
    """C11: this holds even if the service had begun to delete the work."""

    async def look(store: Store) -> None:
        batch = await store.batch(busy.owner.project_id, busy.batches["finished"])
        assert batch is not None
        assert batch.status is BatchStatus.COMPLETED
        assert (batch.total, batch.completed) == (2, 2)
        assert await store.prunable(retention=-(1 << 40), limit=10) == []

    restored.in_store(look)


def test_keys_money_and_usage_are_the_same(restored: Target, busy: Busy, folder: Folder) -> None:
    """D4, F3: the key opens its project, and the ledger sums to the organization's funds."""

    async def account(store: Store) -> tuple[object, ...]:
        [organization] = await store.organizations()
        entries = await store.entries(organization.id)
        assert sum(entry.balance for entry in entries) == organization.balance
        assert sum(entry.credits for entry in entries) == organization.credits
        owner = await store.owner_of(busy.digest, busy.owner.project_id)
        usage = await store.usage(since=0, until=NOW + _DAY)
        return organization, entries, owner, usage, await store.keys(), await store.projects()

    now = restored.in_store(account)
    assert now == folder.play(lambda world: account(world.store))
    assert isinstance(now[2], Owner)
    assert now[2].funds == 1_000_000 + 500 - 700


def test_pages_are_the_same_and_what_comes_next_is_last(restored: Target, busy: Busy, folder: Folder) -> None:
    """B5, C9: new numbers come after all earlier ones, including those of deleted files."""
    project_id = busy.owner.project_id

    async def pages(store: Store) -> tuple[list[Any] | None, list[Any] | None]:
        files = await store.files(project_id, purpose=None, ascending=True, after=None, limit=99, at=NOW)
        return files, await store.batches(project_id, after=None, limit=99)

    async def add(store: Store) -> tuple[str, str, str]:
        world = world_on(store)
        file = await world.stored(busy.owner, id="file-new", object_key="uploads/file-new")
        batch = await world.running(busy.owner, id="batch_new")
        await world.record_all([shard for shard in await world.claim() if shard.batch_id == batch.id])
        await store.set_funds(busy.owner.organization_id, balance=1, credits=0, at=NOW + 1)
        files, batches = await pages(store)
        assert files
        assert batches
        return files[-1].id, batches[0].id, file.id

    before = restored.in_store(pages)
    assert before == folder.play(lambda world: pages(world.store))
    assert before[0] is not None
    assert [file.filename for file in before[0]][:2] == ["one\0.jsonl", "two\0.jsonl"]
    assert restored.in_store(add) == ("file-new", "batch_new", "file-new")


def test_every_object_that_a_row_needs_is_there_and_no_other(restored: Target, busy: Busy) -> None:
    """C12: work, segments and files of active batches are unchanged; the work of terminal ones is not kept."""
    half = busy.batches["half run"]
    assert restored.read(f"work/{half}/1") == f"work of {half}".encode()
    assert restored.read(f"segments/{half}/other-1") == b"+"
    assert restored.read(f"results/{busy.batches['finished']}/2-output") == b"result"
    assert restored.in_objects(lambda objects: objects.names("uploads")) == ["file-0001", "file-0002"]
    assert restored.in_objects(lambda objects: objects.names("restore")) == []
    running = {busy.batches[name] for name in ("finalizing", "half run", "cancelled", "open")}
    assert set(restored.in_objects(lambda objects: objects.names("work"))) == running


def test_rows_and_objects_may_be_kept_in_different_places(mixed_target: Target, archive: Path, busy: Busy) -> None:
    """F2: ``restore`` takes the same settings as ``serve``."""
    result = mixed_target.restore(archive)
    assert result.exit_code == 0, result.output
    half = busy.batches["half run"]
    assert mixed_target.read(f"work/{half}/1") == f"work of {half}".encode()

    async def look(store: Store) -> None:
        batch = await store.batch(busy.owner.project_id, half)
        assert batch is not None
        assert (batch.total, batch.completed) == (8, 1)

    mixed_target.in_store(look)


def test_an_upload_that_was_not_finished_is_dropped(restored: Target, folder: Folder) -> None:
    """B2: its process does not exist any more, so it can never be finished."""

    async def is_kept(store: Store) -> bool:
        return bool(await store.referenced_keys(["uploads/file-unfinished"]))

    assert folder.play(lambda world: is_kept(world.store))
    assert not restored.in_store(is_kept)


def test_the_restored_service_has_an_identity_of_its_own(restored: Target, folder: Folder) -> None:
    """F1: it starts, and the objects of the original are not its own."""

    async def start(settings: Settings) -> Identity:
        async with open_both(settings) as (store, _, _):
            return await store.identity()

    identity = asyncio.run(start(load_settings(**restored.settings)))
    assert restored.in_objects(lambda objects: objects.names("identity")) == [identity.marker]
    assert restored.in_objects(lambda objects: objects.names("restore")) == []
    assert asyncio.run(start(load_settings(data_dir=str(folder.path)))).database_id != identity.database_id


def test_both_dialects_have_the_columns_that_are_copied(postgres: Postgres, archive: Path, to_folder: Target) -> None:
    """A column that is added to one dialect alone must be named here, or else a restore would lose it."""
    only_postgres = {
        "files": {"lease"},
        "batches": {"lease"},
        "shards": {"lease"},
        "lanes": {"next_expires_at", "next_batch_id", "next_n"},
    }
    assert to_folder.restore(archive).exit_code == 0
    with closing(sqlite3.connect(to_folder.data_dir / "batchline.sqlite")) as database:
        names = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        sqlite_columns = {
            name: {row[1] for row in database.execute(f"PRAGMA table_info({name})")}
            for name in names
            if not name.startswith("sqlite_")
        }
    postgres_columns = asyncio.run(_columns(postgres.new_database()))
    not_copied = {"processes", "probe", "identity", "reuse_indexes", "sessions", "admin_sessions", "sightings", "watch"}
    assert set(sqlite_columns) == {*TABLES, *not_copied}
    assert set(postgres_columns) == {*TABLES, *not_copied, "schema_version"}
    added = {name: postgres_columns[name] - sqlite_columns[name] for name in TABLES}
    assert {name: columns for name, columns in added.items() if columns} == only_postgres
    assert all(sqlite_columns[name] <= postgres_columns[name] for name in TABLES)


async def _columns(url: str) -> dict[str, set[str]]:
    connection = await asyncpg.connect(url)
    rows = await connection.fetch(
        "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public'"
    )
    await connection.close()
    found: dict[str, set[str]] = {}
    for row in rows:
        found.setdefault(row["table_name"], set()).add(row["column_name"])
    return found
