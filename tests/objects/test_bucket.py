"""Promises of a bucket alone: multipart uploads, cut connections, scratch files, and bounded memory."""

import asyncio
import gc
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from batchline.domain.errors import ObjectMissing, ObjectsDown
from batchline.objects.bucket_writer import PART_BYTES, BucketWriter
from tests.support.buckets import LARGE, opened, wire_to
from tests.support.s3_server import Seaweed

pytestmark = pytest.mark.anyio


def bytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


async def read_on(stream: AsyncIterator[bytes], read: list[bytes]) -> None:
    """Read a stream until it ends or fails."""
    while chunk := await anext(stream, b""):
        read.append(chunk)


async def test_an_object_of_many_parts(bucket: Seaweed, tmp_path: Path) -> None:
    """B1: pieces of any size arrive in order; before the commit nothing is visible, and no parts are left."""
    async with opened(bucket.new_url(), tmp_path) as objects:
        writer = await objects.create("uploads/file-1")
        for start in range(0, len(LARGE), 777_777):
            await writer.write(LARGE[start : start + 777_777])
            with pytest.raises(ObjectMissing):
                await objects.read("uploads/file-1", 0, 1)
        assert bucket.unfinished_uploads() != []
        await writer.commit()
        assert await objects.read("uploads/file-1", 0, len(LARGE) + 1) == LARGE
        await writer.abort()
        exact = await objects.create("uploads/file-2")
        await exact.write(LARGE[: 2 * PART_BYTES])
        await exact.commit()
        assert await objects.read("uploads/file-2", 0, len(LARGE)) == LARGE[: 2 * PART_BYTES]
    assert bucket.unfinished_uploads() == []


async def test_an_aborted_upload_leaves_no_parts(
    bucket: Seaweed, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """B2: a refused upload leaves nothing, not even parts that no listing shows but that are paid for.

    Nor does it leave an error in the log.
    """
    async with opened(bucket.new_url(), tmp_path) as objects:
        writer = await objects.create("uploads/file-1")
        await writer.write(LARGE)
        await writer.abort()
        with pytest.raises(ValueError, match="closed"):
            await writer.write(b"more")
        assert await objects.names("uploads") == []
    gc.collect()
    assert caplog.records == []
    assert bucket.unfinished_uploads() == []


def test_an_adoption_that_is_cancelled_leaves_no_parts(bucket: Seaweed, tmp_path: Path) -> None:
    """C6: the client of a create may disconnect while the work file is uploaded."""

    async def story(monkeypatch: pytest.MonkeyPatch) -> None:
        async with wire_to(bucket.port) as (wire, endpoint):
            monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
            async with opened(bucket.new_url(), tmp_path) as objects, objects.scratch() as path:
                path.write_bytes(LARGE)
                wire.free.clear()
                accepting = asyncio.create_task(objects.accept(path, "work/batch_1/1"))
                await wire.seen.wait()
                accepting.cancel()
                await asyncio.wait({accepting}, timeout=0.05)
                wire.free.set()
                with pytest.raises(asyncio.CancelledError):
                    await accepting
                assert await objects.names("work") == []

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(story(monkeypatch))
    assert bucket.unfinished_uploads() == []


@pytest.mark.parametrize("spooled", [False, True])
async def test_an_abort_waits_for_a_commit_that_was_cancelled(
    bucket: Seaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spooled: bool
) -> None:
    """B2: an object that is deleted after the abort stays deleted, because no write of that key is under way."""
    async with wire_to(bucket.port) as (wire, endpoint):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        async with opened(bucket.new_url(), tmp_path) as objects:
            writer = await objects.create("uploads/file-1", spooled=spooled)
            await writer.write(b"x")
            wire.free.clear()
            committing = asyncio.create_task(writer.commit())
            await wire.seen.wait()
            committing.cancel()
            aborting = asyncio.create_task(writer.abort())
            await asyncio.wait({aborting}, timeout=0.05)
            assert not aborting.done()
            wire.free.set()
            await aborting
            assert await objects.read("uploads/file-1", 0, 1) == b"x"


async def test_a_spooled_object_is_sent_when_it_is_whole(bucket: Seaweed, tmp_path: Path) -> None:
    """B1: until then its bytes are on the local disk alone, and after that nowhere but in the bucket."""
    async with opened(bucket.new_url(), tmp_path) as objects:
        writer = await objects.create("uploads/file-1", spooled=True)
        for start in range(0, len(LARGE), 777_777):
            await writer.write(LARGE[start : start + 777_777])
        assert bucket.unfinished_uploads() == []
        assert bytes_below(tmp_path) == len(LARGE)
        await writer.commit()
        assert await objects.read("uploads/file-1", 0, len(LARGE) + 1) == LARGE
        assert bytes_below(tmp_path) == 0
    assert bucket.unfinished_uploads() == []


async def test_only_so_many_files_are_sent_at_once(
    bucket: Seaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many uploads and creates end at once, few parts are in memory, and all of them are sent in the end."""
    sending = most = 0
    commit = BucketWriter.commit

    async def counted(writer: BucketWriter, data: bytes) -> None:
        nonlocal sending, most
        if id(writer) not in seen:
            seen.add(id(writer))
            sending += 1
            most = max(most, sending)
        await write(writer, data)

    async def counted_commit(writer: BucketWriter) -> None:
        nonlocal sending
        await commit(writer)
        sending -= 1

    seen: set[int] = set()
    write = BucketWriter.write
    monkeypatch.setattr(BucketWriter, "write", counted)
    monkeypatch.setattr(BucketWriter, "commit", counted_commit)
    async with opened(bucket.new_url(), tmp_path) as objects:
        writers = [await objects.create(f"uploads/file-{n}", spooled=True) for n in range(12)]
        for writer in writers:
            await writer.write(LARGE)
        async with asyncio.TaskGroup() as group:
            for writer in writers:
                group.create_task(writer.commit())
        assert len(await objects.names("uploads")) == 12
    assert most * len(LARGE) <= 64 * 1024 * 1024


async def test_more_objects_than_a_page_lists(bucket: Seaweed, tmp_path: Path) -> None:
    """The pruner sees all of them and deletes all of them."""
    async with opened(bucket.new_url(), tmp_path) as objects:
        async with asyncio.TaskGroup() as group:
            for n in range(1010):
                group.create_task(objects.put(f"segments/batch_1/{n}", b""))
        assert sorted(map(int, await objects.names("segments/batch_1"))) == list(range(1010))
        await objects.delete_all("segments/batch_1")
        assert await objects.names("segments/batch_1") == []


async def test_a_stream_goes_on_where_it_was_cut(
    bucket: Seaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B7: a connection that breaks, or that the store closes, does not interrupt the client's download."""
    async with wire_to(bucket.port) as (wire, endpoint):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        async with opened(bucket.new_url(), tmp_path) as objects:
            await objects.put("uploads/file-1", LARGE)
            before, wire.downloads = wire.connections, 2_000_000
            chunks = [chunk async for chunk in objects.stream("uploads/file-1", 5, len(LARGE))]
            assert b"".join(chunks) == LARGE[5:]
            assert wire.connections > before + 5


async def test_a_stream_is_never_of_two_objects(
    bucket: Seaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B7: if the object was replaced meanwhile, the rest of the new one is not appended to the old one."""
    async with wire_to(bucket.port) as (wire, endpoint):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        async with opened(bucket.new_url(), tmp_path) as objects:
            await objects.put("uploads/file-1", LARGE)
            wire.downloads = 6_000_000
            stream = objects.stream("uploads/file-1", 0, len(LARGE))
            read = [await anext(stream)]
            await objects.put("uploads/file-1", LARGE[::-1])
            with pytest.raises(ObjectsDown):
                await read_on(stream, read)
            assert LARGE.startswith(b"".join(read))


async def test_two_prefixes_of_a_bucket(bucket: Seaweed, tmp_path: Path) -> None:
    """Two services may share a bucket."""
    url = bucket.new_url()
    async with opened(f"{url}/a", tmp_path) as one, opened(f"{url}/ab", tmp_path) as other:
        await one.put("work/batch_1/1", b"one")
        await other.put("work/batch_1/1", b"other")
        await one.delete_all("work")
        assert await other.read("work/batch_1/1", 0, 10) == b"other"
    async with opened(url, tmp_path) as whole:
        assert await whole.read("ab/work/batch_1/1", 0, 10) == b"other"


_DIES_OVER_A_SCRATCH_FILE = """
import asyncio, os, sys
from pathlib import Path
from tests.support.buckets import opened

async def main():
    async with opened("s3://bucket", Path(sys.argv[1])) as objects, objects.scratch() as path:
        path.write_bytes(b"left")
        os._exit(0)

asyncio.run(main())
"""


def run_python(program: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True, env=environment
    )
    return done.stdout


async def test_what_dead_processes_left_on_the_local_disk_goes(tmp_path: Path) -> None:
    """B2: the files of live processes stay, even if several processes share the folder."""

    def folders() -> list[Path]:
        return list(tmp_path.iterdir())

    run_python(_DIES_OVER_A_SCRATCH_FILE, str(tmp_path))
    assert len(folders()) == 1

    async with opened("s3://bucket", tmp_path) as living, living.scratch() as path:
        path.write_bytes(b"mine")
        async with opened("s3://bucket", tmp_path) as starting:
            await starting.clear_temporary()
            async with starting.scratch():
                await starting.clear_temporary()
        assert path.read_bytes() == b"mine"
        assert folders() == [path.parent]
    assert folders() == []


_MOVES_100_MEGABYTES = """
import asyncio, json, sys
from pathlib import Path
import psutil
from tests.support.buckets import opened

PIECE = bytes(256 * 1024)

async def write(objects, key, pieces):
    writer = await objects.create(key)
    for _ in range(pieces):
        await writer.write(bytes(PIECE))
    await writer.commit()

async def accept(objects, key, pieces):
    async with objects.scratch() as path:
        with path.open("wb") as file:
            for _ in range(pieces):
                file.write(PIECE)
        await objects.accept(path, key)

async def stream(objects, key, pieces):
    total = 0
    async for chunk in objects.stream(key, 0, pieces * len(PIECE)):
        total += len(chunk)
    assert total == pieces * len(PIECE)

async def download(objects, key, pieces):
    async with objects.local(key) as path:
        assert path.stat().st_size == pieces * len(PIECE)

async def watch(peaks):
    process = psutil.Process()
    while True:
        peaks[-1] = max(peaks[-1], process.memory_info().rss)
        await asyncio.sleep(0.002)

async def main():
    peaks = [0]
    async with opened(sys.argv[1], Path(sys.argv[2])) as objects, asyncio.TaskGroup() as group:
        watching = group.create_task(watch(peaks))
        for pieces in (48, 400):
            peaks.append(0)
            for move in (write, accept, stream, download):
                await move(objects, f"uploads/{pieces}", pieces)
        watching.cancel()
    print(json.dumps(peaks[1:]))

asyncio.run(main())
"""


def test_memory_does_not_grow_with_an_object(bucket: Seaweed, tmp_path: Path) -> None:
    """B1, B7, C6: writing, accepting, streaming and downloading 100 MB takes about as much memory as 12 MB."""
    small, large = json.loads(run_python(_MOVES_100_MEGABYTES, bucket.new_url(), str(tmp_path)))
    print(f"\npeak {small >> 20} MiB with 12 MB, {large >> 20} MiB with 100 MB")
    assert large - small < 40_000_000
