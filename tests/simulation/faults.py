"""A database and an object store whose calls fail, before they acted or after."""

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from batchline.domain.errors import ObjectsDown, StoreDown
from batchline.ports import Objects, Writer
from batchline.store.sql import Database, Script
from tests.simulation.virtual import Time

T = TypeVar("T")


FAULTS_UNTIL_SECONDS = 60.0
"""The time at which single calls fail no more. Finalizing takes hundreds of calls, and would never end otherwise."""


class Faults:
    """Decides which calls fail: each with a certain chance, and all of them during an outage."""

    def __init__(self, source: random.Random, time: Time, *, chance: float, error: type[Exception]) -> None:
        self._source, self._time, self._chance, self._error = source, time, chance, error
        self.down_until = 0.0

    def go_down(self, seconds: float) -> bool:
        """Begin an outage."""
        self.down_until = self._time.now + seconds
        return True

    async def strike(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make the call, or raise: instead of it, or after it, so that what happened was never reported."""
        if self._time.now < self.down_until:
            raise self._error("unavailable")
        if self._time.now >= FAULTS_UNTIL_SECONDS or self._source.random() >= self._chance:
            return await call()
        if self._source.random() < 0.5:
            raise self._error("failed before it acted")
        await call()
        raise self._error("failed after it acted")


class FailingDatabase:
    """A Database that fails now and then. A write that is reported as failed may have been committed."""

    def __init__(self, database: Database, faults: Faults) -> None:
        self._database, self._faults = database, faults
        self.schema_version = database.schema_version

    async def read(self, script: Callable[[], Script[T]]) -> T:
        return await self._faults.strike(lambda: self._database.read(script))

    async def write(self, script: Callable[[], Script[T]]) -> T:
        return await self._faults.strike(lambda: self._database.write(script))


class FailingObjects:
    """Objects that fail now and then. An object whose commit is reported as failed may exist."""

    def __init__(self, objects: Objects, faults: Faults) -> None:
        self._objects, self._faults = objects, faults

    async def put(self, key: str, data: bytes) -> None:
        await self._faults.strike(lambda: self._objects.put(key, data))

    async def create(self, key: str, *, spooled: bool = False) -> "FailingWriter":
        writer = await self._faults.strike(lambda: self._objects.create(key, spooled=spooled))
        return FailingWriter(writer, self._faults)

    async def accept(self, path: Path, key: str) -> None:
        await self._faults.strike(lambda: self._objects.accept(path, key))

    @asynccontextmanager
    async def scratch(self) -> AsyncIterator[Path]:
        await self._faults.strike(_nothing)
        async with self._objects.scratch() as path:
            yield path

    @asynccontextmanager
    async def local(self, key: str) -> AsyncIterator[Path]:
        await self._faults.strike(_nothing)
        async with self._objects.local(key) as path:
            yield path

    async def read(self, key: str, start: int, length: int) -> bytes:
        return await self._faults.strike(lambda: self._objects.read(key, start, length))

    async def stream(self, key: str, start: int, length: int) -> AsyncIterator[bytes]:
        async for chunk in self._objects.stream(key, start, length):
            await self._faults.strike(_nothing)
            yield chunk

    async def delete(self, key: str) -> None:
        await self._faults.strike(lambda: self._objects.delete(key))

    async def delete_all(self, prefix: str) -> None:
        await self._faults.strike(lambda: self._objects.delete_all(prefix))

    async def names(self, prefix: str) -> list[str]:
        return await self._faults.strike(lambda: self._objects.names(prefix))

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        async for page in self._objects.keys(prefix):
            await self._faults.strike(_nothing)
            yield page

    async def check(self) -> None:
        await self._faults.strike(self._objects.check)


class FailingWriter:
    def __init__(self, writer: Writer, faults: Faults) -> None:
        self._writer, self._faults = writer, faults

    async def write(self, data: bytes) -> None:
        await self._faults.strike(lambda: self._writer.write(data))

    async def commit(self) -> None:
        await self._faults.strike(self._writer.commit)

    async def abort(self) -> None:
        await self._faults.strike(self._writer.abort)


def store_faults(source: random.Random, time: Time, *, chance: float) -> Faults:
    return Faults(source, time, chance=chance, error=StoreDown)


def object_faults(source: random.Random, time: Time, *, chance: float) -> Faults:
    return Faults(source, time, chance=chance, error=ObjectsDown)


async def _nothing() -> None:
    return None
