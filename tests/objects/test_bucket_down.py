"""A bucket that cannot be used: its store dies, stalls, refuses or closes connections, or the settings are wrong."""

import asyncio
import socket
from contextlib import AbstractAsyncContextManager
from datetime import timedelta
from pathlib import Path

import pytest

from batchline.domain.errors import ObjectsDown
from batchline.objects import bucket as bucket_module
from batchline.ports import Objects
from batchline.system import SystemRandom, ThreadPool
from tests.support.buckets import LARGE, opened, wire_to
from tests.support.s3_server import KEY, SECRET, Seaweed

pytestmark = pytest.mark.anyio


async def down_calls(objects: Objects, path: Path) -> list[str]:
    """Return the errors of every kind of call to a store that is down."""

    async def enter(manager: AbstractAsyncContextManager[Path]) -> None:
        async with manager:
            raise AssertionError("there is no store")

    async def drain() -> None:
        async for _ in objects.stream("uploads/file-1", 0, 1):
            raise AssertionError("there is no store")

    async def write() -> None:
        writer = await objects.create("uploads/file-1")
        try:
            await writer.write(LARGE)
            await writer.commit()
        finally:
            await writer.abort()

    results = await asyncio.gather(
        objects.put("uploads/file-1", b"x"),
        write(),
        objects.accept(path, "uploads/file-1"),
        enter(objects.local("uploads/file-1")),
        objects.read("uploads/file-1", 0, 1),
        drain(),
        objects.delete("uploads/file-1"),
        objects.delete_all("uploads"),
        objects.names("uploads"),
        objects.check(),
        return_exceptions=True,
    )
    assert [type(result) for result in results] == [ObjectsDown] * len(results)
    return [str(result) for result in results]


async def test_a_wire_that_is_always_cut(bucket: Seaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B2: no call hangs, and no new object exists afterwards."""
    source = tmp_path / "source"
    source.write_bytes(LARGE)

    url = bucket.new_url()
    async with wire_to(bucket.port) as (wire, endpoint):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        wire.uploads = 1
        async with opened(url, tmp_path) as objects:
            assert all("did not answer" in message for message in await down_calls(objects, source))
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.endpoint)
    async with opened(url, tmp_path) as objects:
        assert await objects.names("uploads") == []


def test_a_store_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B2, F5: a store that accepts connections and never answers is reported too, in bounded time."""
    silence, retries = bucket_module._CLIENT["read_timeout"], bucket_module._RETRIES["retry_timeout"]
    assert isinstance(silence, timedelta)
    assert silence + retries <= timedelta(seconds=15)
    monkeypatch.setitem(bucket_module._CLIENT, "read_timeout", timedelta(seconds=0.2))
    monkeypatch.setitem(bucket_module._RETRIES, "max_retries", 0)
    source = tmp_path / "source"
    source.write_bytes(LARGE)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        point_to(monkeypatch, f"http://127.0.0.1:{deaf.getsockname()[1]}")

        async def story() -> None:
            async with opened("s3://bucket/prefix", tmp_path) as objects:
                bounds = objects._store.client_options
                assert bounds is not None
                assert {"connect_timeout", "read_timeout", "timeout"} <= set(bounds)
                await down_calls(objects, source)

        asyncio.run(story())


@pytest.mark.parametrize("sent", [0, 40])
async def test_a_store_that_sends_less_than_it_announces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: int
) -> None:
    """C12: the rest of an object is requested as long as bytes come. A store that sends none is not asked for ever."""
    requests: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        start = 0 if len(requests) == 1 else sent
        body = bytes(sent - start)
        head = b"206 Partial Content" if len(requests) < 10 else b"400 Asked Again And Again"
        writer.write(
            b'HTTP/1.1 %b\r\nConnection: close\r\nETag: "1"\r\nLast-Modified: Tue, 17 Nov 2026 07:00:00 GMT\r\n'
            b"Content-Range: bytes %d-99/100\r\nContent-Length: %d\r\n\r\n%b" % (head, start, len(body), body)
        )
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    point_to(monkeypatch, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    monkeypatch.setitem(bucket_module._RETRIES, "max_retries", 0)
    async with server, opened("s3://bucket/prefix", tmp_path) as objects:
        received = bytearray()

        async def drain() -> None:
            async for chunk in objects.stream("uploads/file-1", 0, 100):
                received.extend(chunk)

        with pytest.raises(ObjectsDown, match="announced more bytes than it sent"):
            await drain()
    assert received == bytes(sent)


async def test_a_store_that_dies_under_an_upload(
    own_bucket: Seaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B2, C12: an interrupted upload is no object, even after the store is back; then it can be repeated."""
    monkeypatch.setitem(bucket_module._RETRIES, "max_retries", 1)
    source = tmp_path / "source"
    source.write_bytes(LARGE)

    async with opened(own_bucket.new_url(), tmp_path / "scratch") as objects:
        await objects.put("uploads/file-0", b"durable")
        writer = await objects.create("uploads/file-1")
        await writer.write(LARGE)
        own_bucket.kill()
        with pytest.raises(ObjectsDown):
            await writer.write(LARGE * 2)
        await writer.abort()
        await down_calls(objects, source)
        own_bucket.start()
        assert await objects.names("uploads") == ["file-0"]
        assert await objects.read("uploads/file-0", 0, 10) == b"durable"
        again = await objects.create("uploads/file-1")
        await again.write(LARGE)
        await again.commit()
        assert await objects.read("uploads/file-1", 0, len(LARGE)) == LARGE


@pytest.mark.parametrize("wrong", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"])
async def test_wrong_credentials_are_reported_without_secrets(
    bucket: Seaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    """F5: the error of the check names the settings to look at, and holds no secret."""
    monkeypatch.setenv(wrong, "guessed")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-of-somebody")
    source = tmp_path / "source"
    source.write_bytes(LARGE)

    async with opened(bucket.new_url(), tmp_path / "scratch") as objects:
        for message in await down_calls(objects, source):
            assert "403" in message
            assert "AWS_SECRET_ACCESS_KEY" in message
            assert not any(secret in message for secret in (KEY, SECRET, "guessed", "token-of-somebody"))


async def test_missing_credentials_are_reported(
    bucket: Seaweed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F5: if neither the environment nor the machine has credentials, the error says so."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
    # Never the machine's own: a test asks nobody for credentials.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", nobody)

    async with opened(bucket.new_url(), tmp_path) as objects:
        with pytest.raises(ObjectsDown, match="no credentials; set AWS_ACCESS_KEY_ID"):
            await objects.check()


async def test_a_bucket_that_does_not_exist_is_not_a_missing_object(bucket: Seaweed, tmp_path: Path) -> None:
    """C2: ``object missing`` ends batches; a wrong name in the settings must not."""
    async with opened("s3://nobodys-bucket/tests", tmp_path) as objects:
        with pytest.raises(ObjectsDown, match="NoSuchBucket; check the bucket's name"):
            await objects.read("uploads/file-1", 0, 1)
        with pytest.raises(ObjectsDown, match="NoSuchBucket"):
            await anext(objects.stream("uploads/file-1", 0, 1))


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket",
        "s3:bucket",
        "s3://",
        "s3:///prefix",
        "S3//bucket",
        "gs://bucket",
        "https://host/bucket",
        "s3://me:hidden@bucket/prefix",
        "s3://bucket/a b",
        "s3://bucket/../other",
        "s3://bucket/a//b",
        "s3://bucket/prefix?key=hidden",
        "s3://bucket/prefix#hidden",
        "s3://bucket:80/prefix",
    ],
)
def test_a_url_that_names_no_bucket(tmp_path: Path, url: str) -> None:
    """F2: the message says what to write, and does not quote a URL that may hold a secret."""
    with pytest.raises(ValueError, match="s3://bucket/prefix") as raised:
        bucket_module.BucketObjects.open(url, threads=ThreadPool(1, name="x"), random=SystemRandom(), scratch=tmp_path)
    assert "hidden" not in str(raised.value)


def test_an_endpoint_without_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: the error comes at the start and names the variable."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "127.0.0.1:9000")
    with pytest.raises(ValueError, match="AWS_ENDPOINT_URL must begin with https:// or http://"):
        bucket_module.BucketObjects.open(
            "s3://bucket", threads=ThreadPool(1, name="x"), random=SystemRandom(), scratch=tmp_path
        )


def point_to(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
