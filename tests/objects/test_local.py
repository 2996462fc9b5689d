"""Promises of a folder alone: the order of syncs, a full disk, leftovers."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from io import FileIO
from pathlib import Path

import pytest

from batchline.domain.errors import ObjectMissing, ObjectsDown
from batchline.objects import local as local_module
from batchline.ports import Objects
from tests.support.folders import files_below, folder

pytestmark = pytest.mark.anyio


async def test_a_folder_keeps_only_objects(tmp_path: Path) -> None:
    """B2: no operation leaves a temporary file or an empty folder of a deleted prefix."""
    async with folder(tmp_path) as objects:
        await objects.put("uploads/file-1", b"1")
        aborted = await objects.create("uploads/file-2")
        await aborted.write(b"2")
        await aborted.abort()
        await objects.put("work/batch_1/0", b"")
        await objects.delete_all("work/batch_1")
        await objects.check()
        async with objects.scratch() as path:
            path.write_bytes(b"")
    assert files_below(tmp_path) == ["uploads/file-1"]
    assert list((tmp_path / "work").iterdir()) == []


async def test_the_folder_of_a_batch_is_removed_with_its_last_object(tmp_path: Path) -> None:
    """Otherwise each batch whose results have expired would leave a folder for ever, on the disk and in memory."""
    async with folder(tmp_path) as objects:
        for key in ("results/batch_1/output", "results/batch_1/error", "uploads/file-1"):
            await objects.put(key, b"1")
        await objects.delete("results/batch_1/output")
        assert files_below(tmp_path) == ["results/batch_1/error", "uploads/file-1"]
        await objects.delete("results/batch_1/error")
        await objects.delete("uploads/file-1")
        assert await objects.names("results") == []
        assert (tmp_path / "uploads").is_dir()
        await objects.put("results/batch_1/again", b"2")
        assert await objects.read("results/batch_1/again", 0, 1) == b"2"


async def test_the_folders_of_many_batches_take_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The results of a month have a folder each. To remember all of them would cost more with every batch."""
    monkeypatch.setattr(local_module, "_MAX_DURABLE_FOLDERS", 8)
    async with folder(tmp_path) as objects:
        for number in range(20):
            await objects.put(f"results/batch_{number}/output", b"1")
            assert len(objects._folder._durable) <= 8
        await objects.put("results/batch_0/error", b"2")
        await objects.delete_all("results/batch_0")
        await objects.put("results/batch_0/output", b"3")
        assert await objects.read("results/batch_0/output", 0, 1) == b"3"


async def test_a_folder_that_another_process_removed_is_made_again(tmp_path: Path) -> None:
    """B2: another process may remove a folder that this one remembers; a put is durable all the same."""
    async with folder(tmp_path) as serving, folder(tmp_path) as worker:
        await worker.put("segments/batch_1/a-1", b"1")
        await serving.delete_all("segments/batch_1")
        await worker.put("segments/batch_1/a-2", b"2")
        await serving.delete_all("segments")
        await worker.put("segments/batch_2/a-3", b"3")
        await worker.put("segments/batch_1/a-4", b"4")
    assert files_below(tmp_path) == ["segments/batch_1/a-4", "segments/batch_2/a-3"]


def test_what_an_earlier_life_left_is_cleared(tmp_path: Path) -> None:
    """B2: half-written files are removed at the start; objects stay; the temporary folder is not a prefix."""

    async def first_life() -> None:
        async with folder(tmp_path) as objects:
            await objects.put("uploads/file-1", b"1")
            writer = await objects.create("uploads/file-2")
            await writer.write(b"cut off by a crash")
            await writer.abort()
            (tmp_path / "tmp" / "left").write_bytes(b"half")
            (tmp_path / "tmp" / "folder").mkdir()
            (tmp_path / "tmp" / "folder" / "left").write_bytes(b"half")

    async def second_life() -> None:
        async with folder(tmp_path) as objects:
            await objects.clear_temporary()
            assert files_below(tmp_path) == ["uploads/file-1"]
            await objects.put("uploads/file-2", b"2")
            with pytest.raises(ValueError, match="tmp/left"):
                await objects.delete("tmp/left")

    async def first_start() -> None:
        async with folder(tmp_path / "new") as objects:
            await objects.clear_temporary()
            await objects.put("uploads/file-1", b"1")

    asyncio.run(first_life())
    asyncio.run(second_life())
    asyncio.run(first_start())


class Journal:
    """Return what was synced and renamed, in order; files by their inode, which a rename keeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        real_sync, real_replace = os.fsync, os.replace

        def sync(descriptor: int) -> None:
            real_sync(descriptor)
            self.events.append(("sync", os.fstat(descriptor).st_ino))

        def replace(source: Path, target: Path) -> None:
            real_replace(source, target)
            self.events.append(("rename", os.stat(target).st_ino))  # noqa: PTH116

        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(os, "replace", replace)

    def take(self) -> list[tuple[str, int]]:
        taken, self.events = self.events, []
        return taken


def inode(path: Path) -> int:
    return path.stat().st_ino


async def by_put(objects: Objects, key: str) -> None:
    await objects.put(key, b"x")


async def by_writer(objects: Objects, key: str) -> None:
    writer = await objects.create(key)
    await writer.write(b"x")
    await writer.commit()


async def by_accept(objects: Objects, key: str) -> None:
    async with objects.scratch() as path:
        path.write_bytes(b"x")
        await objects.accept(path, key)


@pytest.mark.parametrize("way", [by_put, by_writer, by_accept])
async def test_bytes_are_on_the_disk_before_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[[Objects, str], Awaitable[None]]
) -> None:
    """C7: synced are the bytes, new folders and, after the rename, the folder; in a known folder nothing more."""
    journal = Journal(monkeypatch)
    root = tmp_path / "data" / "objects"
    new = root / "work" / "batch_1"

    async with folder(root) as objects:
        await way(objects, "work/batch_1/0")
        data = inode(new / "0")
        naming = [tmp_path, tmp_path / "data", root, root / "work"]
        events = journal.take()
        assert set(events[:-2]) == {("sync", data), *(("sync", inode(parent)) for parent in naming)}
        assert events[-2:] == [("rename", data), ("sync", inode(new))]
        await way(objects, "work/batch_1/1")
        data = inode(new / "1")
        assert journal.take() == [("sync", data), ("rename", data), ("sync", inode(new))]


async def test_a_folder_found_is_not_trusted_to_be_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: its creator may have died before the name was synced, so the first use syncs it again."""
    (tmp_path / "uploads").mkdir()
    journal = Journal(monkeypatch)

    async with folder(tmp_path) as objects:
        await objects.put("uploads/file-1", b"x")
        events = journal.take()
        data = inode(tmp_path / "uploads" / "file-1")
        assert events.index(("sync", inode(tmp_path))) < events.index(("rename", data))


FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
from batchline.domain.errors import ObjectMissing, ObjectsDown
from batchline.objects.local import LocalObjects
from batchline.system import SystemRandom, ThreadPool

async def refused(call):
    try:
        await call
    except ObjectsDown:
        print("refused")

async def main():
    objects = LocalObjects(Path(sys.argv[1]), ThreadPool(2, name="objects"), SystemRandom())
    await objects.put("uploads/old", b"old")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    await refused(objects.put("uploads/new", bytes(200_000)))
    await refused(objects.put("uploads/old", bytes(200_000)))
    writer = await objects.create("uploads/slow")
    await writer.write(bytes(60_000))
    await refused(writer.write(bytes(60_000)))
    print(sorted(path.name for path in Path(sys.argv[1]).rglob("*") if path.is_file()))
    await writer.abort()
    print(await objects.read("uploads/old", 0, 100))

asyncio.run(main())
"""


def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    """B2: the write is refused as ``storage_error``, and only objects that were whole before exist."""
    done = subprocess.run([sys.executable, "-c", FULL_DISK, tmp_path], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["refused", "refused", "refused", "['old']", "b'old'"]


async def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    """B2, F5: every way of writing raises ObjectsDown."""
    (tmp_path / "file").write_bytes(b"in the way")

    async def enter(manager: AbstractAsyncContextManager[Path]) -> None:
        async with manager:
            raise AssertionError("there is no disk")

    async with folder(tmp_path / "file" / "objects") as objects:
        writer = await objects.create("uploads/file-1")
        calls = [objects.put("a", b""), writer.write(b"x"), objects.check(), enter(objects.scratch())]
        results = await asyncio.gather(*calls, objects.accept(tmp_path / "file", "a"), return_exceptions=True)
        assert [type(result) for result in results] == [ObjectsDown] * 5
    assert files_below(tmp_path) == ["file"]


async def test_a_folder_that_cannot_be_listed_is_told(tmp_path: Path) -> None:
    """F5: a start says that the objects cannot be used, and a periodic task tries again."""
    (tmp_path / "results").symlink_to("results")
    async with folder(tmp_path) as objects:
        with pytest.raises(ObjectsDown):
            await objects.names("results")
        with pytest.raises(ObjectsDown):
            await anext(aiter(objects.keys("results")))


async def test_an_abort_waits_for_a_write_that_was_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B2: if a client disconnects during a write, the thread still writes to its own file."""
    real_write = local_module._write_all
    entered, release = threading.Event(), threading.Event()
    written: list[bytes] = []

    def slow_write(file: FileIO, data: bytes) -> None:
        entered.set()
        release.wait()
        real_write(file, data)
        written.append(data)

    monkeypatch.setattr(local_module, "_write_all", slow_write)

    async with folder(tmp_path) as objects:
        writer = await objects.create("uploads/file-1")
        writing = asyncio.create_task(writer.write(b"x"))
        await asyncio.to_thread(entered.wait)
        writing.cancel()
        aborting = asyncio.create_task(writer.abort())
        await asyncio.wait({aborting}, timeout=0.05)
        release.set()
        await aborting
        assert written == [b"x"]
        assert files_below(tmp_path) == []


async def test_a_pipe_in_the_place_of_an_object_holds_up_nobody(tmp_path: Path) -> None:
    """Nobody writes to it, so that a usual open would wait for ever."""
    async with folder(tmp_path) as objects:
        await objects.put("uploads/a", b"a")
        (tmp_path / "uploads" / "a").unlink()
        os.mkfifo(tmp_path / "uploads" / "a")
        with pytest.raises(ObjectMissing):
            await objects.read("uploads/a", 0, 1)
        with pytest.raises(ObjectMissing):
            [chunk async for chunk in objects.stream("uploads/a", 0, 1)]
