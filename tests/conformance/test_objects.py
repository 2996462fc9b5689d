"""One suite for the port ``Objects``, run on every implementation."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path

import pytest

from batchline.domain.errors import ObjectMissing
from batchline.ports import Objects
from tests.support.buckets import opened
from tests.support.folders import folder
from tests.support.s3_server import Seaweed

Opened = Callable[[], AbstractAsyncContextManager[Objects]]
Story = Callable[[Objects], Awaitable[None]]
Tell = Callable[[Story], None]


@pytest.fixture(params=["folder", "bucket"])
def tell(request: pytest.FixtureRequest, tmp_path: Path) -> Tell:
    """Run a test on an empty object store of each kind."""
    kinds: dict[str, Callable[[], Opened]] = {
        "folder": lambda: lambda: folder(tmp_path / "objects"),
        "bucket": lambda: _in_bucket(request.getfixturevalue("bucket"), tmp_path),
    }
    open_store = kinds[request.param]()

    async def whole(story: Story) -> None:
        async with open_store() as objects:
            await story(objects)

    return lambda story: asyncio.run(whole(story))


def _in_bucket(server: Seaweed, tmp_path: Path) -> Opened:
    url = server.new_url()
    return lambda: opened(url, tmp_path / "scratch")


async def content(objects: Objects, key: str) -> bytes:
    return await objects.read(key, 0, 1 << 20)


async def chunks_of(objects: Objects, key: str, start: int, length: int) -> list[bytes]:
    return [chunk async for chunk in objects.stream(key, start, length)]


async def keys_below(objects: Objects, prefix: str) -> list[str]:
    """Of objects: some stores go on listing an emptied prefix for a while."""
    keys = []
    for name in await objects.names(prefix):
        key = f"{prefix}/{name}"
        keys += await keys_below(objects, key) if await is_missing(objects, key) else [key]
    return keys


async def is_missing(objects: Objects, key: str) -> bool:
    try:
        await objects.read(key, 0, 1)
    except ObjectMissing:
        return True
    return False


def test_what_is_put_is_read(tell: Tell) -> None:
    """B1: an object holds the bytes that were put; a second put replaces the first."""

    async def story(objects: Objects) -> None:
        await objects.put("uploads/file-1", bytes(range(256)))
        await objects.put("uploads/file-2", b"")
        assert await content(objects, "uploads/file-1") == bytes(range(256))
        assert await content(objects, "uploads/file-2") == b""
        await objects.put("uploads/file-1", b"new")
        assert await content(objects, "uploads/file-1") == b"new"

    tell(story)


def test_a_missing_object_is_told(tell: Tell) -> None:
    """C2: a missing object is distinct from an unavailable store. A stream raises it at its first read."""

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


@pytest.mark.rule("C12", "An object is seen only when it is whole.")
@pytest.mark.parametrize("spooled", [False, True])
def test_an_object_appears_whole_at_commit(tell: Tell, spooled: bool) -> None:
    """B1, C12: nothing of the object is visible before the commit."""

    async def story(objects: Objects) -> None:
        writer = await objects.create("segments/batch_1/7-0", spooled=spooled)
        await writer.write(b"one ")
        await writer.write(b"")
        await writer.write(b"two")
        assert await is_missing(objects, "segments/batch_1/7-0")
        assert await objects.names("segments/batch_1") == []
        await writer.commit()
        assert await content(objects, "segments/batch_1/7-0") == b"one two"
        await writer.abort()
        assert await content(objects, "segments/batch_1/7-0") == b"one two"
        empty = await objects.create("segments/batch_1/empty", spooled=spooled)
        await empty.commit()
        assert await content(objects, "segments/batch_1/empty") == b""

    tell(story)


@pytest.mark.parametrize("spooled", [False, True])
def test_an_aborted_object_never_was(tell: Tell, spooled: bool) -> None:
    """B2: a refused upload leaves nothing, and an older object of that key is unchanged."""

    async def story(objects: Objects) -> None:
        await objects.put("uploads/file-1", b"old")
        writer = await objects.create("uploads/file-1", spooled=spooled)
        await writer.write(b"new")
        await writer.abort()
        await writer.abort()
        assert await content(objects, "uploads/file-1") == b"old"
        with pytest.raises(ValueError, match="closed"):
            await writer.commit()
        assert await content(objects, "uploads/file-1") == b"old"

    tell(story)


def test_a_scratch_file_can_become_an_object(tell: Tell) -> None:
    """C7: a work file is written to scratch, then accepted; a file that is not accepted is removed."""

    async def story(objects: Objects) -> None:
        async with objects.scratch() as path, objects.scratch() as other:
            assert path != other
            path.write_bytes(b"lines")
            other.write_bytes(b"never accepted")
            await objects.accept(path, "work/batch_1/0")
        assert not path.exists()
        assert not other.exists()
        assert await content(objects, "work/batch_1/0") == b"lines"
        with suppress(RuntimeError):
            async with objects.scratch() as path:
                path.write_bytes(b"half")
                raise RuntimeError("on the way")
        assert not path.exists()
        async with objects.scratch():
            pass

    tell(story)


def test_an_object_can_be_had_as_a_file(tell: Tell) -> None:
    """C6: a child process reads it."""

    async def story(objects: Objects) -> None:
        await objects.put("uploads/file-1", b"lines")
        async with objects.local("uploads/file-1") as path:
            assert path.is_absolute()
            assert path.read_bytes() == b"lines"
        assert await content(objects, "uploads/file-1") == b"lines"

    tell(story)


@pytest.mark.parametrize("start", [0, 1, 262_143, 262_144, 262_145, 599_999])
@pytest.mark.parametrize("length", [0, 1, 262_144, 300_000, 600_000])
def test_any_range_can_be_read(tell: Tell, start: int, length: int) -> None:
    """B7: any range can be read, at once or as a stream; it ends with the object."""
    data = bytes(range(250)) * 2400

    async def story(objects: Objects) -> None:
        await objects.put("uploads/file-1", data)
        part = data[start : start + length]
        assert await objects.read("uploads/file-1", start, length) == part
        chunks = await chunks_of(objects, "uploads/file-1", start, length)
        assert b"".join(chunks) == part
        assert all(0 < len(chunk) <= 262_144 for chunk in chunks)

    tell(story)


@pytest.mark.rule("B9", "Who has begun to read an object reads to its end.")
def test_a_delete_does_not_cut_a_stream(tell: Tell) -> None:
    """B8, B9: a reader that has begun reads to the end."""

    async def story(objects: Objects) -> None:
        await objects.put("uploads/file-1", b"x" * 1_000_000)
        stream = objects.stream("uploads/file-1", 0, 1_000_000)
        first = await anext(stream)
        await objects.delete("uploads/file-1")
        assert await is_missing(objects, "uploads/file-1")
        assert len(first) + sum([len(chunk) async for chunk in stream]) == 1_000_000

    tell(story)


def test_delete(tell: Tell) -> None:
    """B8: a deleted object does not exist from then on; a second delete is fine."""

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
    """The pruner lists these: prefixes and objects alike, each once."""

    async def story(objects: Objects) -> None:
        for key in ("segments/b/0", "segments/a/1", "segments/a/0", "segments/c", "segment/x", "segments.x/y"):
            await objects.put(key, b"")
        assert sorted(await objects.names("segments")) == ["a", "b", "c"]
        assert sorted(await objects.names("segments/a")) == ["0", "1"]
        assert await objects.names("segments/c") == []
        assert await objects.names("nothing/here") == []

    tell(story)


def test_keys_are_all_below_some_at_a_time(tell: Tell) -> None:
    """The pruner lists these in pages: each key once, whole, and none of a similar prefix."""

    async def story(objects: Objects) -> None:
        below = {f"results/batch_{n}/{name}" for n in range(150) for name in ("output", "errors")} | {"results/alone"}
        for key in (*below, "result/x", "results.x/y"):
            await objects.put(key, b"")
        pages = [page async for page in objects.keys("results")]
        found = [key for page in pages for key in page]
        assert sorted(found) == sorted(below)
        assert max(map(len, pages)) <= 1000
        assert [key for page in [page async for page in objects.keys("results/batch_7")] for key in page] == [
            "results/batch_7/errors",
            "results/batch_7/output",
        ]
        assert [page async for page in objects.keys("nothing/here") if page] == []

    tell(story)


def test_delete_all_takes_what_is_below_and_nothing_else(tell: Tell) -> None:
    """One call deletes a batch's work, nested keys included; similar prefixes stay; the prefix can be used again."""

    async def story(objects: Objects) -> None:
        for key in ("segments/a/0", "segments/a/deep/er/1", "segments/ab/0", "segments/b"):
            await objects.put(key, b"x")
        await objects.delete_all("segments/a")
        await objects.delete_all("segments/a")
        await objects.delete_all("segments/b")
        assert await keys_below(objects, "segments") == ["segments/ab/0", "segments/b"]
        await objects.put("segments/a/0", b"again")
        await objects.put("segments/a/deep/er/1", b"again")
        assert await content(objects, "segments/a/deep/er/1") == b"again"

    tell(story)


def test_puts_succeed_while_others_are_deleted(tell: Tell) -> None:
    """Many puts below one new prefix all succeed while others are deleted."""

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
    """B3: no key leads outside the store."""

    async def enter(manager: AbstractAsyncContextManager[Path]) -> None:
        async with manager:
            raise AssertionError("not a key")

    async def story(objects: Objects) -> None:
        async with objects.scratch() as path:
            calls = [
                objects.put(key, b""),
                objects.create(key),
                objects.accept(path, key),
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
    """F5: the readiness probe writes, reads and deletes."""

    async def story(objects: Objects) -> None:
        await objects.put("uploads/file-1", b"")
        await objects.check()
        assert await objects.names("uploads") == ["file-1"]

    tell(story)
