"""Clocks of simulated machines, which are wrong and jump, and a database that many processes share."""

import random
from collections.abc import Callable
from typing import Any, TypeVar

from batchline.store.sqlite.database import SqliteDatabase
from tests.simulation.virtual import EPOCH, Time, VirtualClock

T = TypeVar("T")
HOUR, DAY = 3600.0, 86_400.0
SMALL_ERRORS = (0.0, -20.0, 20.0)
"""What no process can notice."""
ERRORS = (*SMALL_ERRORS, 2 * HOUR, 25 * HOUR, 31 * DAY, -2 * HOUR, -31 * DAY)


_DIFFERENCES = {
    "owner <> :owner OR ": "",
    "watch.owner = :owner AND ": "",
    "owner = :owner AND seen": "seen",
    "state = 'leased' AND owner NOT IN": "state = 'leased' AND lease_until < :now AND owner NOT IN",
}
"""What is written otherwise in the queries if many processes share a database."""


class WallClock:
    """The wall clock of a machine."""

    def __init__(self) -> None:
        self.error = 0.0
        """By how much it is ahead of the true time."""


class MachineClock(VirtualClock):
    """The clocks of one process: the wall clock of its machine, and steady ones that begin anywhere."""

    def __init__(self, time: Time, wall: WallClock, source: random.Random) -> None:
        super().__init__(time)
        self._wall, self._steady_offset = wall, source.uniform(0, 1e6)

    def now(self) -> float:
        return EPOCH + self._time.now + self._wall.error

    def steady(self) -> float:
        return self._time.now + self._steady_offset

    def uptime(self) -> float:
        return self._time.now + 1000.0


class SharedDatabase(SqliteDatabase):
    """Stands for PostgreSQL: a lease ends by the clock of the database, and no owner is dead before that."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._queries = {name: _shared(sql) for name, sql in self._queries.items()}

    async def time(self) -> float:
        return self._clock.now()


class CalledThreads:
    """Runs blocking calls at once."""

    async def run(self, call: Callable[[], T]) -> T:
        return call()


def _shared(sql: str) -> str:
    for of_one_process, of_many in _DIFFERENCES.items():
        sql = sql.replace(of_one_process, of_many)
    return sql
