"""Opens a store on PostgreSQL whose database a test can look into."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from batchline.store.postgres.database import PostgresDatabase
from batchline.store.store import SqlStore
from batchline.system import SystemClock
from tests.support.earlier_copies import remember_rows
from tests.support.postgres_server import Leases
from tests.support.stores import World


class Opened(World):
    def __init__(self, database: PostgresDatabase, leases: Leases) -> None:
        super().__init__(
            SqlStore(database),
            pass_time=leases.age,
            lose_time=leases.age_in_outage,
            die=leases.lapse,
            set_time=leases.set_time,
            remember=partial(remember_rows, leases.execute, leases.fetch),
        )
        self.database = database
        self.execute, self.fetch = leases.execute, leases.fetch


@asynccontextmanager
async def opened(url: str, *, pooled: bool = False, size: int = 8, **timeouts: float) -> AsyncIterator[Opened]:
    """Open the store of a database; ``timeouts`` are those of PostgresDatabase."""
    database = await PostgresDatabase.open(url, pooled=pooled, size=size, clock=SystemClock(), **timeouts)
    leases = Leases(url)
    try:
        yield Opened(database, leases)
    finally:
        await leases.close()
        await database.close()
