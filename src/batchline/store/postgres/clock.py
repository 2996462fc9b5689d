"""The clock of a process of a fleet: that of the database, read every few seconds, and the uptime added since.

Windows and lifetimes end by the database's clock in the database itself. This clock gives the times that a process
writes, and tells a worker which lines are past their window.
"""

from typing import NamedTuple, Protocol

from batchline.ports import ClockState, MachineClock

TOLERANCE_SECONDS = 60.0
"""The difference between the clock of a machine and that of the database from which on it is reported."""


class HasTime(Protocol):
    async def time(self) -> float:
        """Return the Unix time of the database. Raise StoreDown."""


class _Reading(NamedTuple):
    """The database's time, and the machine's clocks at that moment."""

    time: float
    wall: float
    uptime: float


class DatabaseClock:
    """The WatchedClock of a process that uses PostgreSQL."""

    def __init__(self, machine: MachineClock, database: HasTime) -> None:
        self._machine, self._database = machine, database
        self.steady, self.sleep = machine.steady, machine.sleep
        self._last = _Reading(machine.now(), machine.now(), machine.uptime())

    def now(self) -> float:
        """Return the database's time.

        If the wall clock went further than the uptime since the last reading, the machine may have stood still, as a
        virtual machine does while it is copied. Then the later time is returned until the next reading.
        """
        passed = self._machine.now() - self._last.wall
        return max(self.due(), self._last.time + passed) if self._may_have_stood_still(passed) else self.due()

    def due(self) -> float:
        return self._last.time + self._passed

    @property
    def state(self) -> ClockState:
        ahead = self._machine.now() - self.due()
        return ClockState(ahead_seconds=ahead, problem=_problem(ahead))

    async def check(self) -> ClockState:
        asked = self._machine.uptime()
        time = await self._database.time()
        answered = self._machine.uptime()
        # The database read its clock in between.
        self._last = _Reading(time + (answered - asked) / 2, self._machine.now(), answered)
        return self.state

    @property
    def _passed(self) -> float:
        return self._machine.uptime() - self._last.uptime

    def _may_have_stood_still(self, passed: float) -> bool:
        return passed - self._passed > TOLERANCE_SECONDS


def _problem(ahead: float) -> str | None:
    if abs(ahead) <= TOLERANCE_SECONDS:
        return None
    side = "ahead of" if ahead > 0 else "behind"
    return f"the clock of this machine is {abs(ahead):.0f} seconds {side} that of the database, which decides"
