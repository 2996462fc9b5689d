"""The clock of a process of a fleet is that of the database, whatever the machine's clock says."""

import pytest

from batchline.domain.errors import StoreDown
from batchline.ports import ClockState
from batchline.store.postgres.clock import TOLERANCE_SECONDS, DatabaseClock
from tests.support.clocks import SettableClock
from tests.support.postgres_store import opened

pytestmark = pytest.mark.anyio

NOW = 1_800_000_000.0
DAY = 86_400.0


class _Database:
    """A database whose clock stands still, and which takes a while to tell the time."""

    def __init__(self, machine: SettableClock) -> None:
        self.now, self.seconds_to_answer, self.is_down = NOW, 0.0, False
        self._machine = machine

    async def time(self) -> float:
        if self.is_down:
            raise StoreDown("down")
        self._machine.advance(self.seconds_to_answer)
        return self.now


@pytest.mark.rule("C13", "In a fleet only the clock of the database ends a window.")
@pytest.mark.parametrize("ahead", [0.0, 25 * 3600, -31 * DAY])
async def test_the_clock_of_the_machine_does_not_matter(ahead: float) -> None:
    machine = SettableClock(now=NOW + ahead)
    clock = DatabaseClock(machine, _Database(machine))
    await clock.check()
    machine.advance(3.0)
    assert clock.now() == clock.due() == NOW + 3
    assert clock.state.ahead_seconds == ahead
    assert (clock.state.problem is None) is (ahead == 0.0)
    assert not clock.state.held, "the time is not in doubt, only the clock of this machine is"


async def test_a_jump_of_the_machine_does_not_matter_either() -> None:
    machine = SettableClock(now=NOW)
    clock = DatabaseClock(machine, _Database(machine))
    await clock.check()
    assert clock.state == ClockState()
    machine.jump(DAY)
    assert clock.due() == NOW
    assert "86400 seconds ahead of that of the database" in str(clock.state.problem)
    await clock.check()
    assert clock.now() == NOW


async def test_a_machine_that_stood_still_dates_nothing_back() -> None:
    """A virtual machine is copied for a day: its uptime stood still, and its wall clock was set afterwards."""
    machine = SettableClock(now=NOW)
    clock = DatabaseClock(machine, _Database(machine))
    await clock.check()
    machine.jump(DAY)
    assert clock.now() == NOW + DAY, "a batch that is created now must not expire at the next reading"
    machine.jump(-2 * DAY)
    assert clock.now() == NOW


async def test_the_time_of_the_answer_is_counted_half() -> None:
    machine = SettableClock(now=NOW)
    database = _Database(machine)
    database.seconds_to_answer = 4.0
    clock = DatabaseClock(machine, database)
    await clock.check()
    assert clock.now() == NOW + 2
    assert abs(clock.state.ahead_seconds) < TOLERANCE_SECONDS


async def test_during_an_outage_the_time_goes_on() -> None:
    machine = SettableClock(now=NOW + DAY)
    database = _Database(machine)
    clock = DatabaseClock(machine, database)
    await clock.check()
    database.is_down = True
    machine.advance(100.0)
    with pytest.raises(StoreDown):
        await clock.check()
    assert clock.now() == NOW + 100


async def test_a_real_database_tells_its_time(postgres_url: str) -> None:
    async with opened(postgres_url) as world:
        before = float(await world.fetch("SELECT extract(epoch FROM clock_timestamp())::float8"))
        time = await world.database.time()
        unix_time = await world.fetch("SELECT unix_time()")
        after = float(await world.fetch("SELECT extract(epoch FROM clock_timestamp())::float8"))
        assert before <= time <= after
        assert int(before) <= unix_time <= after
