"""Every implementation of the Store port, by name: one suite runs on them all."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from batchline.store.sqlite.database import SqliteDatabase
from batchline.store.store import SqlStore
from batchline.system import ThreadPool
from clocks import SettableClock
from stores.world import NOW, World


@asynccontextmanager
async def _on_sqlite(folder: Path) -> AsyncIterator[World]:
    clock = SettableClock(now=NOW)
    writer, reader = ThreadPool(1, name="writer"), ThreadPool(1, name="reader")
    database = SqliteDatabase(folder / "store.sqlite", clock=clock, writer=writer, reader=reader)
    try:
        yield World(SqlStore(database), pass_time=clock.advance)
    finally:
        writer.close()
        reader.close()
        database.close()


_STORES: dict[str, Callable[[Path], AbstractAsyncContextManager[World]]] = {"sqlite": _on_sqlite}


@pytest.fixture(params=_STORES)
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], AbstractAsyncContextManager[World]]:
    """How a world is opened; ``scenario`` opens it in the test's own loop."""
    return partial(_STORES[request.param], tmp_path)
