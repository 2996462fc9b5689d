"""A restore that is interrupted has restored nothing, and can be run again."""

import asyncio
import resource
import signal
from pathlib import Path

import asyncpg  # type: ignore[import-untyped]

from batchline.app.startup import folder_lock
from batchline.ports import Store
from tests.support.busy_folder import Busy, Folder
from tests.support.postgres_server import Postgres
from tests.support.restore_targets import Target, back_up
from tests.support.s3_server import Seaweed
from tests.support.service import Program, wait_until


async def _batches(store: Store) -> int:
    return sum([len(await store.batches(project.id, after=None, limit=99) or []) for project in await store.projects()])


def test_killed_before_the_rows_it_restored_nothing_and_runs_again(
    archive: Path, tmp_path: Path, postgres: Postgres, bucket: Seaweed
) -> None:
    """Kill a restore with SIGKILL when all objects are in the bucket and the rows are being inserted."""
    url = postgres.new_database()
    target = Target(tmp_path / "restored", database_url=url, storage_url=bucket.new_url())
    asyncio.run(_kill_at_the_rows(url, "-m", "batchline", "restore", str(archive), *target.flags))
    assert target.in_store(_batches) == 0
    assert target.in_objects(lambda objects: objects.names("uploads"))
    again = target.restore(archive)
    assert again.exit_code == 0, again.output
    assert target.in_store(_batches) == 6
    assert target.in_objects(lambda objects: objects.names("restore")) == []


async def _kill_at_the_rows(url: str, *command: str) -> None:
    """Hold a reader's lock on the tables, for which the restore has to wait."""
    reader = await asyncpg.connect(url)
    async with reader.transaction():
        await reader.execute("LOCK TABLE organizations IN SHARE MODE")
        restoring = Program(*command)
        try:
            await asyncio.to_thread(wait_until, lambda: asyncio.run(_waits(url)), what="the rows")
            restoring.send(signal.SIGKILL)
            assert restoring.wait() == -signal.SIGKILL
        finally:
            restoring.end()
    await reader.close()


async def _waits(url: str) -> bool:
    connection = await asyncpg.connect(url)
    try:
        waiting = await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted")
    finally:
        await connection.close()
    return bool(waiting)


def test_a_disk_that_takes_no_more_has_taken_nothing_and_it_runs_again(
    busy: Busy, folder: Folder, tmp_path: Path, to_folder: Target
) -> None:
    folder.put("uploads/file-0002", bytes(2_000_000))
    back_up(folder.path, tmp_path / "a.tar")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, hard))
    try:
        message = to_folder.refusal(tmp_path / "a.tar")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "The objects cannot be written: " in message
    assert "File too large" in message
    assert not (to_folder.data_dir / "batchline.sqlite").exists()
    assert (to_folder.data_dir / "objects" / "restore" / "unfinished").exists()
    again = to_folder.restore(tmp_path / "a.tar")
    assert again.exit_code == 0, again.output
    assert to_folder.read("uploads/file-0002") == bytes(2_000_000)


def test_the_next_one_may_be_of_another_backup(archive: Path, to_folder: Target) -> None:
    """Objects that the killed restore wrote do not stay in the new service."""
    left = to_folder.data_dir / "objects" / "uploads" / "file-of-another"
    left.parent.mkdir(parents=True)
    left.touch()
    (to_folder.data_dir / "objects" / "restore").mkdir()
    (to_folder.data_dir / "objects" / "restore" / "unfinished").touch()
    assert to_folder.restore(archive).exit_code == 0
    assert not left.exists()


def test_nothing_is_restored_while_the_folder_is_served(archive: Path, to_folder: Target) -> None:
    """F1: one process per data folder."""
    to_folder.data_dir.mkdir()
    with folder_lock(to_folder.data_dir):
        assert "is served by another process" in to_folder.refusal(archive)
