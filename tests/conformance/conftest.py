"""Provides every implementation of the Store port, so that one suite runs on them all."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from batchline.store.sqlite.database import SqliteDatabase
from batchline.store.store import SqlStore
from batchline.system import ThreadPool
from tests.support.clocks import SettableClock
from tests.support.earlier_copies import bring_back, copy_of
from tests.support.postgres_store import opened
from tests.support.stores import LEASE, ME, NOW, World


@asynccontextmanager
async def _on_sqlite(folder: Path) -> AsyncIterator[World]:
    clock = SettableClock(now=NOW)
    writer, reader = ThreadPool(1, name="writer"), ThreadPool(1, name="reader")
    database = SqliteDatabase(folder / "store.sqlite", clock=clock, writer=writer, reader=reader)

    store = SqlStore(database)

    async def pass_time(seconds: float) -> None:
        await store.watch_leases(owner=ME, lease=LEASE)
        while seconds > 0:
            clock.advance(min(seconds, LEASE / 3))
            await store.watch_leases(owner=ME, lease=LEASE)
            seconds -= LEASE / 3

    async def lose_time(seconds: float) -> None:
        clock.advance(seconds)

    async def set_time(time: int) -> None:
        clock.set(time)

    async def die(owner: str) -> None:
        """Do nothing: every process but the one that holds the folder's lock is dead anyway."""

    async def remember() -> Callable[[], Awaitable[None]]:
        earlier = copy_of(folder / "store.sqlite")

        async def go_back() -> None:
            bring_back(earlier, folder / "store.sqlite")

        return go_back

    try:
        yield World(store, pass_time=pass_time, lose_time=lose_time, die=die, set_time=set_time, remember=remember)
    finally:
        writer.close()
        reader.close()
        database.close()


@pytest.fixture(params=["sqlite", "postgres"])
def open_world(request: pytest.FixtureRequest) -> Callable[[], AbstractAsyncContextManager[World]]:
    """Return the function that opens a store; its server is started outside of the test's event loop."""
    if request.param == "sqlite":
        return partial(_on_sqlite, request.getfixturevalue("tmp_path"))
    return partial(opened, request.getfixturevalue("postgres_url"))


@pytest.fixture
async def world(open_world: Callable[[], AbstractAsyncContextManager[World]]) -> AsyncIterator[World]:
    """Open a store in the test's event loop."""
    async with open_world() as opened_world:
        yield opened_world
