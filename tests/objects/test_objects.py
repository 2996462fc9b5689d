"""One suite for the port ``Objects``, run on every implementation; below it, what only a folder can be asked."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from io import FileIO
from pathlib import Path

import pytest

from batchline.domain.errors import ObjectMissing, ObjectsDown
from batchline.objects import local as local_module
from batchline.objects.local import LocalObjects
from batchline.ports import Objects
from batchline.system import SystemRandom, ThreadPool

Opened = Callable[[], AbstractAsyncContextManager[Objects]]
Story = Callable[[Objects], Awaitable[None]]


@asynccontextmanager
async def folder(root: Path) -> AsyncIterator[LocalObjects]:
    threads = ThreadPool(4, name="objects")
    try:
        yield LocalObjects(root, threads, SystemRandom())
    finally:
        threads.close()


@pytest.fixture(params=["folder"])
def tell(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Story], None]:
    """Run a story on an empty store of each kind."""
    kinds: dict[str, Opened] = {"folder": lambda: folder(tmp_path / "objects")}
    opened = kinds[request.param]

    async def whole(story: Story) -> None:
        async with opened() as objects:
            await story(objects)

    return lambda story: asyncio.run(whole(story))


Tell = Callable[[Story], None]


async def content(objects: Objects, key: str) -> bytes:
    return await objects.read(key, 0, 1 << 20)


async def chunks_of(objects: Objects, key: str, start: int, length: int) -> list[bytes]:
    return [chunk async for chunk in objects.stream(key, start, length)]


async def is_missing(objects: Objects, key: str) -> bool:
    try:
        await objects.read(key, 0, 1)
    except ObjectMissing:
        return True
    return False


def test_what_is_put_is_read(tell: Tell) -> None:
    """B1: the bytes as they came; a second put takes the first one's place."""

    async def story(objects: Objects) -> None:
        await objects.put("uploads/file-1", bytes(range(256)))
        await objects.put("uploads/file-2", b"")
        assert await content(objects, "uploads/file-1") == bytes(range(256))
        assert await content(objects, "uploads/file-2") == b""
        await objects.put("uploads/file-1", b"new")
        assert await content(objects, "uploads/file-1") == b"new"

    tell(story)


def test_a_missing_object_is_told(tell: Tell) -> None:
    """C2: ``object missing`` is not ``store down``. A stream says so when it is first asked for bytes."""

    async def story(objects: Objects) -> None:
        await objects.put("work/batch_1/0", b"x")
        for key in ("uploads/none", "work/batch_1", "work/batch_1/0/deeper"):
            with pytest.raises(ObjectMissing):
                await objects.read(key, 0, 1)
            with pytest.raises(ObjectMissing):
                async with objects.local(key):
                    raise AssertionError("there is nothing to open")
            stream = objects.stream(key, 0, 0)
            with pytest.raises(ObjectMissing):
                await anext(stream)

    tell(story)


def test_an_object_appears_whole_at_commit(tell: Tell) -> None:
    """B1, C12: nothing is to be seen of it before."""

    async def story(objects: Objects) -> None:
        writer = await objects.create("segments/batch_1/7-0")
        await writer.write(b"one ")
        await writer.write(b"")
        await writer.write(b"two")
        assert await is_missing(objects, "segments/batch_1/7-0")
        assert await objects.names("segments/batch_1") == []
        await writer.commit()
        assert await content(objects, "segments/batch_1/7-0") == b"one two"
        await writer.abort()
        assert await content(objects, "segments/batch_1/7-0") == b"one two"
        empty = await objects.create("segments/batch_1/empty")
        await empty.commit()
        assert await content(objects, "segments/batch_1/empty") == b""

    tell(story)


def test_an_aborted_object_never_was(tell: Tell) -> None:
    """B2: nothing of a refused upload stays, and an older object of that key is as it was."""

    async def story(objects: Objects) -> None:
        await objects.put("uploads/file-1", b"old")
        writer = await objects.create("uploads/file-1")
        await writer.write(b"new")
        await writer.abort()
        await writer.abort()
        assert await content(objects, "uploads/file-1") == b"old"
        with pytest.raises(ValueError, match="over"):
            await writer.commit()
        assert await content(objects, "uploads/file-1") == b"old"

    tell(story)


def test_a_scratch_file_can_become_an_object(tell: Tell) -> None:
    """C7: a work file is written beside the objects, then taken in; what is not taken in goes."""

    async def story(objects: Objects) -> None:
        async with objects.scratch() as path, objects.scratch() as other:
            assert path != other
            path.write_bytes(b"lines")
            other.write_bytes(b"never adopted")
            await objects.adopt(path, "work/batch_1/0")
        assert not path.exists()
        assert not other.exists()
        assert await content(objects, "work/batch_1/0") == b"lines"
        with pytest.raises(RuntimeError, match="on the way"):
            async with objects.scratch() as path:
                path.write_bytes(b"half")
                raise RuntimeError("on the way")
        assert not path.exists()
        async with objects.scratch():
            pass

    tell(story)


def test_an_object_can_be_had_as_a_file(tell: Tell) -> None:
    """C6: for a child process to read."""

    async def story(objects: Objects) -> None:
        await objects.put("uploads/file-1", b"lines")
        async with objects.local("uploads/file-1") as path:
            assert path.is_absolute()
            assert path.read_bytes() == b"lines"
        assert await content(objects, "uploads/file-1") == b"lines"

    tell(story)


@pytest.mark.parametrize("start", [0, 1, 262_143, 262_144, 262_145, 599_999])
@pytest.mark.parametrize("length", [0, 1, 262_144, 300_000, 600_000])
def test_ranges(tell: Tell, start: int, length: int) -> None:
    """B7: any part, at once or streamed in pieces; where the object ends, the part ends."""
    data = bytes(range(250)) * 2400

    async def story(objects: Objects) -> None:
        await objects.put("uploads/file-1", data)
        part = data[start : start + length]
        assert await objects.read("uploads/file-1", start, length) == part
        chunks = await chunks_of(objects, "uploads/file-1", start, length)
        assert b"".join(chunks) == part
        assert all(0 < len(chunk) <= 262_144 for chunk in chunks)

    tell(story)


def test_a_delete_does_not_cut_a_stream(tell: Tell) -> None:
    """B8, B9: who has begun to read reads to the end."""

    async def story(objects: Objects) -> None:
        await objects.put("uploads/file-1", b"x" * 1_000_000)
        stream = objects.stream("uploads/file-1", 0, 1_000_000)
        first = await anext(stream)
        await objects.delete("uploads/file-1")
        assert await is_missing(objects, "uploads/file-1")
        assert len(first) + sum([len(chunk) async for chunk in stream]) == 1_000_000

    tell(story)


def test_delete(tell: Tell) -> None:
    """B8: gone at once; a second time is fine."""

    async def story(objects: Objects) -> None:
        await objects.put("uploads/file-1", b"1")
        await objects.put("uploads/file-2", b"2")
        for _ in range(2):
            await objects.delete("uploads/file-1")
            assert await objects.names("uploads") == ["file-2"]
        await objects.delete("never/was")
        await objects.delete("uploads/file-2/deeper")

    tell(story)


def test_names_are_those_one_level_below(tell: Tell) -> None:
    """What sweeps go through: folders and objects alike, each once."""

    async def story(objects: Objects) -> None:
        for key in ("segments/b/0", "segments/a/1", "segments/a/0", "segments/c", "segment/x", "segments.x/y"):
            await objects.put(key, b"")
        assert sorted(await objects.names("segments")) == ["a", "b", "c"]
        assert sorted(await objects.names("segments/a")) == ["0", "1"]
        assert await objects.names("segments/c") == []
        assert await objects.names("nothing/here") == []

    tell(story)


def test_delete_all_takes_what_is_below_and_nothing_else(tell: Tell) -> None:
    """The work of a batch goes with one call, also in layers; its neighbours stay; the prefix can be used again."""

    async def story(objects: Objects) -> None:
        for key in ("segments/a/0", "segments/a/deep/er/1", "segments/ab/0", "segments/b"):
            await objects.put(key, b"x")
        await objects.delete_all("segments/a")
        await objects.delete_all("segments/a")
        await objects.delete_all("segments/b")
        assert sorted(await objects.names("segments")) == ["ab", "b"]
        await objects.put("segments/a/0", b"again")
        await objects.put("segments/a/deep/er/1", b"again")
        assert await content(objects, "segments/a/deep/er/1") == b"again"

    tell(story)


def test_writers_at_once(tell: Tell) -> None:
    """Many puts under one new prefix, while others are deleted: every one holds."""

    async def story(objects: Objects) -> None:
        puts = [objects.put(f"segments/batch_{n % 3}/{n}", str(n).encode()) for n in range(60)]
        await asyncio.gather(*puts, *(objects.delete_all(f"segments/other_{n}") for n in range(20)))
        for n in range(60):
            assert await content(objects, f"segments/batch_{n % 3}/{n}") == str(n).encode()

    tell(story)


BAD_KEYS = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "../a",
    "a/.",
    "a\\b",
    "a b",
    "é",
    "a\n",
    "a\x00b",
    "~/a*",
]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_key_is_never_a_way_out(tell: Tell, key: str) -> None:
    """B3: whatever comes as a key, nothing outside the store is touched."""

    async def enter(manager: AbstractAsyncContextManager[Path]) -> None:
        async with manager:
            raise AssertionError("not a key")

    async def story(objects: Objects) -> None:
        async with objects.scratch() as path:
            calls = [
                objects.put(key, b""),
                objects.create(key),
                objects.adopt(path, key),
                enter(objects.local(key)),
                objects.read(key, 0, 1),
                chunks_of(objects, key, 0, 1),
                objects.delete(key),
                objects.delete_all(key),
                objects.names(key),
            ]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(result) for result in results] == [ValueError] * len(calls)

    tell(story)


def test_a_check_leaves_nothing(tell: Tell) -> None:
    """F5: readiness writes, reads and removes."""

    async def story(objects: Objects) -> None:
        await objects.put("uploads/file-1", b"")
        await objects.check()
        assert await objects.names("uploads") == ["file-1"]

    tell(story)


def files_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_a_folder_keeps_only_objects(tmp_path: Path) -> None:
    """B2: whatever was done, no temporary file and no emptied folder of a deleted prefix is left."""

    async def story() -> None:
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

    asyncio.run(story())
    assert files_below(tmp_path) == ["uploads/file-1"]
    assert list((tmp_path / "work").iterdir()) == []


def test_what_an_earlier_life_left_is_cleared(tmp_path: Path) -> None:
    """B2: half-written files go at start; objects stay; the folder for temporary files is not a prefix."""

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
    """What was synced and renamed, in order; files by their inode, which a rename keeps."""

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


async def by_adoption(objects: Objects, key: str) -> None:
    async with objects.scratch() as path:
        path.write_bytes(b"x")
        await objects.adopt(path, key)


@pytest.mark.parametrize("way", [by_put, by_writer, by_adoption])
def test_bytes_are_on_the_disk_before_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Callable[[Objects, str], Awaitable[None]]
) -> None:
    """C7: the bytes, the folders made for them, the rename, the folder that names them; in a known folder no more."""
    journal = Journal(monkeypatch)
    root = tmp_path / "data" / "objects"
    new = root / "work" / "batch_1"

    async def story() -> None:
        async with folder(root) as objects:
            await way(objects, "work/batch_1/0")
            data = inode(new / "0")
            made = [("sync", inode(made)) for made in (tmp_path / "data", root, root / "work")]
            written, named = ("sync", data), [("rename", data), ("sync", inode(new))]
            events = journal.take()
            assert events[-2:] == named
            assert set(events[:-2]) - {("sync", inode(tmp_path))} == {written, *made}
            await way(objects, "work/batch_1/1")
            data = inode(new / "1")
            assert journal.take() == [("sync", data), ("rename", data), ("sync", inode(new))]

    asyncio.run(story())


def test_a_folder_found_is_not_trusted_to_be_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: whoever made it may have died before its name was synced, so the first use syncs it again."""
    (tmp_path / "uploads").mkdir()
    journal = Journal(monkeypatch)

    async def story() -> None:
        async with folder(tmp_path) as objects:
            await objects.put("uploads/file-1", b"x")
            events = journal.take()
            data = inode(tmp_path / "uploads" / "file-1")
            assert events.index(("sync", inode(tmp_path))) < events.index(("rename", data))

    asyncio.run(story())


FULL_DISK = """
import asyncio, resource, sys
from pathlib import Path
from batchline.domain.errors import ObjectsDown
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
    """B2: the write is refused as ``storage_error``, and only what was whole before is there."""
    done = subprocess.run([sys.executable, "-c", FULL_DISK, tmp_path], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["refused", "refused", "refused", "['old']", "b'old'"]


def test_a_folder_that_is_gone_is_told(tmp_path: Path) -> None:
    """B2, F5: every way of writing says ObjectsDown."""
    (tmp_path / "file").write_bytes(b"in the way")

    async def enter(manager: AbstractAsyncContextManager[Path]) -> None:
        async with manager:
            raise AssertionError("there is no disk")

    async def story() -> None:
        async with folder(tmp_path / "file" / "objects") as objects:
            writer = await objects.create("uploads/file-1")
            calls = [objects.put("a", b""), writer.write(b"x"), objects.check(), enter(objects.scratch())]
            results = await asyncio.gather(*calls, objects.adopt(tmp_path / "file", "a"), return_exceptions=True)
            assert [type(result) for result in results] == [ObjectsDown] * 5

    asyncio.run(story())
    assert files_below(tmp_path) == ["file"]


def test_an_abort_waits_for_a_write_that_was_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B2: a client leaves while its bytes are being written; the thread still writes to a file that is its own."""
    real_write = local_module._write_all
    entered, release = threading.Event(), threading.Event()
    written: list[bytes] = []

    def slow_write(file: FileIO, data: bytes) -> None:
        entered.set()
        release.wait()
        real_write(file, data)
        written.append(data)

    monkeypatch.setattr(local_module, "_write_all", slow_write)

    async def story() -> None:
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

    asyncio.run(story())
