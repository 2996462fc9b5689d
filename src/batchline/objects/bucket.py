"""Keeps objects in a bucket of an S3-compatible store.

An object exists, whole, once the store confirmed it. Nothing is ever renamed, and no client is redirected to the store.
The usual AWS variables configure the store: AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID and so on.
"""

import os
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import obstore
from obstore.store import S3Store

from batchline.domain.errors import ObjectsDown
from batchline.objects.bucket_writer import BucketWriter
from batchline.objects.keys import TEMPORARY, components, is_component
from batchline.objects.s3_errors import FAULTS, explained, is_missing, is_past_the_end
from batchline.objects.scratch import Scratch
from batchline.objects.spool import CHUNK_BYTES, FileSender, SpooledWriter, make_file, write_at
from batchline.ports import Random, Threads, Writer

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ClientConfig, RetryConfig

_PAGE_KEYS = 1000
_UNLIMITED_BYTES = 1 << 50
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")

# An unavailable store is detected within 15 s: no retry begins after 5 s, and none lasts more than 10 s without data.
_CLIENT: "ClientConfig" = {
    "connect_timeout": timedelta(seconds=3),
    "read_timeout": timedelta(seconds=10),
    # The limit for a whole answer, which takes as long as the client of a download reads.
    "timeout": timedelta(hours=1),
}
_RETRIES: "RetryConfig" = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=5),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 2},
}


class BucketObjects:
    """Objects in a bucket, below an optional prefix."""

    def __init__(self, store: S3Store, *, scratch: Scratch, threads: Threads, random: Random) -> None:
        self._store, self._scratch = store, scratch
        self._threads, self._random = threads, random
        self._sender = FileSender(threads)

    @classmethod
    def open(cls, url: str, *, threads: Threads, random: Random, scratch: Path) -> "BucketObjects":
        """Open ``s3://bucket/prefix`` without a request to it. Raise ValueError, which says what to write instead."""
        bucket, prefix = _parse(url)
        store = S3Store(
            bucket,
            prefix=prefix,
            client_options={**_CLIENT, "allow_http": _endpoint_is_plain()},
            retry_config=_RETRIES,
        )
        return cls(store, scratch=Scratch(scratch, threads=threads, random=random), threads=threads, random=random)

    async def put(self, key: str, data: bytes) -> None:
        await self._put(_checked(key), data)

    async def create(self, key: str, *, spooled: bool = False) -> Writer:
        writer = BucketWriter(self._store, _checked(key))
        if not spooled:
            return writer
        return SpooledWriter(writer, sender=self._sender, scratch=self._scratch, threads=self._threads)

    async def accept(self, path: Path, key: str) -> None:
        writer = BucketWriter(self._store, _checked(key))
        try:
            await self._sender.send(path, writer)
        except BaseException:
            await writer.abort()
            raise

    def scratch(self) -> AbstractAsyncContextManager[Path]:
        return self._scratch.file()

    @asynccontextmanager
    async def local(self, key: str) -> AsyncIterator[Path]:
        _checked(key)
        async with self._scratch.file() as path:
            await self._download(key, path)
            yield path

    async def read(self, key: str, start: int, length: int) -> bytes:
        return await self._read(_checked(key), start, length)

    async def stream(self, key: str, start: int, length: int) -> AsyncIterator[bytes]:
        _checked(key)
        if length == 0:
            await self._read(key, start, 0)
        end = start + length
        version: str | None = None
        while start < end:
            # Stores close connections that a slow reader leaves idle; then the rest is requested again.
            requested_from = start
            try:
                answer = await obstore.get_async(self._store, key, options=_range(start, end, version))
                end, version = min(end, answer.range[1]), answer.meta["e_tag"]
                async for piece in answer.stream(min_chunk_size=CHUNK_BYTES):
                    for chunk in _split(piece):
                        yield chunk
                        start += len(chunk)
            except FAULTS as fault:
                if is_past_the_end(fault):
                    return
                if start == requested_from:
                    raise explained(fault, action=f"Reading {key}") from None
            else:
                if start == requested_from < end:
                    raise ObjectsDown(f"Reading {key}: the bucket's store announced more bytes than it sent")

    async def delete(self, key: str) -> None:
        await self._delete([_checked(key)])

    async def delete_all(self, prefix: str) -> None:
        async for keys in self.keys(prefix):
            await self._delete(keys)

    async def names(self, prefix: str) -> list[str]:
        try:
            found = await obstore.list_with_delimiter_async(self._store, _checked(prefix))
        except FAULTS as fault:
            raise explained(fault, action=f"Listing {prefix}") from None
        paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return sorted({path.rpartition("/")[2] for path in paths if path.startswith(f"{prefix}/")})

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        pages = obstore.list(self._store, _checked(prefix), chunk_size=_PAGE_KEYS)
        try:
            async for page in pages:
                # Some stores also list a marker object for the prefix itself.
                yield [path for found in page if (path := found["path"]).startswith(f"{prefix}/")]
        except FAULTS as fault:
            raise explained(fault, action=f"Listing {prefix}") from None

    async def check(self) -> None:
        key = f"{TEMPORARY}/{self._random.bytes(16).hex()}"
        await self._put(key, key.encode())
        try:
            if await self._read(key, 0, CHUNK_BYTES) != key.encode():
                raise ObjectsDown("What was written to the bucket is not what is read")
        finally:
            await self._delete([key])

    async def clear_temporary(self) -> None:
        """Remove the scratch files of processes that died."""
        await self._scratch.clear()

    def close(self) -> None:
        """Remove the scratch folder of this process."""
        self._scratch.close()

    async def _put(self, key: str, data: bytes) -> None:
        try:
            await obstore.put_async(self._store, key, data, use_multipart=False)
        except FAULTS as fault:
            raise explained(fault, action=f"Writing {key}") from None

    async def _read(self, key: str, start: int, length: int) -> bytes:
        """Return a range. For an empty range one byte is requested, to find out whether the object exists."""
        try:
            data = await obstore.get_range_async(self._store, key, start=start, length=length or 1)
        except FAULTS as fault:
            if is_past_the_end(fault):
                return b""
            raise explained(fault, action=f"Reading {key}") from None
        return bytes(data)[:length]

    async def _delete(self, keys: list[str]) -> None:
        try:
            await obstore.delete_async(self._store, keys)
        except FAULTS as fault:
            if not is_missing(fault):
                raise explained(fault, action=f"Deleting {keys[0]}") from None

    async def _download(self, key: str, path: Path) -> None:
        await self._threads.run(partial(make_file, path))
        at = 0
        async for chunk in self.stream(key, 0, _UNLIMITED_BYTES):
            await self._threads.run(partial(write_at, path, at, chunk))
            at += len(chunk)


def _parse(url: str) -> tuple[str, str | None]:
    # The message does not quote the URL, which may hold a secret by mistake.
    parts = urlsplit(url)
    prefix = parts.path.strip("/")
    names = [parts.netloc, *(prefix.split("/") if prefix else [])]
    if parts.scheme != "s3" or parts.query or parts.fragment or not all(map(is_component, names)):
        raise ValueError(
            "A bucket is named as s3://bucket/prefix, with letters, digits, dots, hyphens and underscores; "
            "the endpoint and the credentials belong in AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return parts.netloc, prefix or None


def _endpoint_is_plain() -> bool:
    """Return whether the endpoint that the environment names has no TLS. Raise ValueError if it is no URL."""
    for name in _ENDPOINTS:
        if endpoint := os.environ.get(name):
            if urlsplit(endpoint).scheme not in {"http", "https"}:
                raise ValueError(f"{name} must begin with https:// or http://")
            return endpoint.startswith("http://")
    return False


def _checked(key: str) -> str:
    components(key)
    return key


def _range(start: int, end: int, version: str | None) -> "GetOptions":
    return {"range": (start, end)} if version is None else {"range": (start, end), "if_match": version}


def _split(piece: bytes) -> list[bytes]:
    data = bytes(piece)
    return [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
