"""The clock of a service on one machine: what is due while the clock of the machine is wrong (B4, C13)."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from batchline.domain.errors import StoreDown
from batchline.ports import ClockState
from batchline.store.sqlite.clock import (
    ANCHOR_SECONDS,
    SAVE_INTERVAL_SECONDS,
    START_GAP_SECONDS,
    START_HOLD_SECONDS,
    TOLERANCE_SECONDS,
    ClockFile,
    FollowingClock,
    TrustedClock,
)
from tests.support.clocks import SettableClock

pytestmark = pytest.mark.anyio

T = TypeVar("T")
NOW = 1_800_000_000.0
HOUR, DAY = 3600.0, 86_400.0
MONTH = 31 * DAY


class _Inline:
    async def run(self, call: Callable[[], T]) -> T:
        return call()


class _Service:
    """A service that starts, runs and stops on a machine whose clock a test sets."""

    def __init__(self, folder: Path, *, now: float = NOW) -> None:
        self.file, self.machine = ClockFile(folder), SettableClock(now=now)
        self.start()

    def start(self) -> None:
        self.clock = TrustedClock(self.machine, file=self.file, threads=_Inline())

    async def run(self, seconds: float) -> None:
        """Let time pass, with a check now and then."""
        while seconds > 0:
            self.machine.advance(min(seconds, 5.0))
            await self.clock.check()
            seconds -= 5.0

    async def stop_for(self, seconds: float) -> None:
        await self.clock.check()
        self.machine.advance(seconds)
        self.start()
        await self.clock.check()

    @property
    def is_held(self) -> bool:
        assert (self.clock.due() == 0.0) is self.clock.state.held
        return self.clock.state.held


@pytest.fixture
async def service(tmp_path: Path) -> _Service:
    service = _Service(tmp_path)
    await service.clock.check()
    return service


async def test_a_clock_that_runs_evenly_is_followed(service: _Service) -> None:
    await service.run(ANCHOR_SECONDS)
    service.machine.jump(TOLERANCE_SECONDS - 1)
    await service.run(ANCHOR_SECONDS)
    service.machine.jump(-TOLERANCE_SECONDS + 1)
    assert service.clock.now() == service.clock.due() == service.machine.now()
    assert service.clock.state == ClockState()


@pytest.mark.rule("C13", "After a jump of the clock of the only machine nothing expires until the clock is back.")
@pytest.mark.rule("B4", "After a jump of the clock of the only machine no file expires until the clock is back.")
async def test_after_a_jump_nothing_is_due_until_the_clock_is_back(service: _Service) -> None:
    await service.run(2 * START_HOLD_SECONDS)
    service.machine.jump(MONTH)
    assert service.is_held, "held at the first look, not at the next check"
    await service.run(3 * HOUR)
    assert service.is_held, "however long it lasts"
    assert "31.0 days ahead" in str(service.clock.state.problem)
    service.machine.jump(-MONTH)
    assert not service.is_held
    assert service.clock.due() == service.clock.now() == service.machine.now()


async def test_after_a_jump_nothing_is_due_until_an_operator_accepts_the_clock(service: _Service) -> None:
    await service.run(2 * START_HOLD_SECONDS)
    service.machine.jump(DAY)
    await service.run(10)
    assert service.is_held
    service.file.accept()
    await service.clock.check()
    assert not service.is_held
    assert service.clock.due() == service.machine.now()
    service.machine.jump(DAY)
    await service.run(10)
    assert service.is_held, "one word is for one jump"


async def test_what_is_written_during_a_jump_does_not_end_too_early_whichever_clock_is_right(
    service: _Service,
) -> None:
    """The later clock is written: else a batch of that time would end at once when the clock is accepted."""
    await service.run(2 * START_HOLD_SECONDS)
    service.machine.jump(DAY)
    assert service.clock.now() == service.machine.now()
    service.machine.jump(-2 * DAY)
    assert service.clock.now() == service.machine.now() + DAY


async def test_a_clock_that_goes_back_only_delays_what_is_due(service: _Service) -> None:
    await service.run(2 * START_HOLD_SECONDS)
    before = service.machine.now()
    service.machine.jump(-DAY)
    await service.run(10)
    assert service.clock.due() == service.machine.now()
    assert service.clock.now() == before + 10
    assert "behind the latest time seen" in str(service.clock.state.problem)
    service.machine.jump(DAY)
    await service.run(10)
    assert service.clock.state == ClockState()


async def test_a_clock_that_runs_too_fast_is_not_followed(service: _Service) -> None:
    await service.run(2 * START_HOLD_SECONDS)
    for _ in range(100):
        service.machine.jump(1.0)
        service.machine.advance(5.0)
    assert service.is_held


async def test_a_short_stop_raises_no_doubt(service: _Service) -> None:
    await service.stop_for(START_GAP_SECONDS - 1)
    assert service.clock.state == ClockState()
    assert service.clock.due() == service.machine.now()


@pytest.mark.rule("C13", "After a long stop of the only machine nothing expires for the first hour.")
async def test_after_a_long_stop_the_clock_is_trusted_once_it_ran_evenly_for_a_while(service: _Service) -> None:
    await service.stop_for(MONTH)
    assert service.is_held
    assert service.clock.now() == service.machine.now(), "new work is not dated a month back"
    await service.run(START_HOLD_SECONDS - 60)
    assert service.is_held
    await service.run(120)
    assert not service.is_held
    assert service.clock.due() == service.machine.now()


async def test_a_clock_that_is_set_after_a_start_has_deleted_nothing(service: _Service) -> None:
    """A machine starts a month ahead, and a few seconds later NTP sets its clock."""
    service.machine.jump(MONTH)
    await service.stop_for(20)
    assert service.is_held
    await service.run(6)
    assert service.is_held
    service.machine.jump(-MONTH)
    await service.run(5)
    assert not service.is_held
    assert service.clock.due() == service.clock.now() == service.machine.now()


async def test_a_machine_without_a_clock_of_its_own_is_trusted_again_after_a_while(service: _Service) -> None:
    """It starts with the time at which it stopped, and NTP sets the clock later."""
    service.machine.jump(-DAY)
    await service.stop_for(DAY)
    assert service.clock.state == ClockState()
    service.machine.jump(DAY)
    await service.run(10)
    assert service.is_held
    await service.run(START_HOLD_SECONDS)
    assert not service.is_held


async def test_a_machine_that_starts_in_the_past_dates_nothing_back(service: _Service) -> None:
    service.machine.set(1000.0)
    service.start()
    assert service.clock.due() == 1000.0
    assert service.clock.now() == pytest.approx(NOW, abs=SAVE_INTERVAL_SECONDS)
    service.machine.set(NOW + 40)
    await service.run(5)
    assert service.clock.state == ClockState()


async def test_a_jump_outlasts_a_restart(service: _Service) -> None:
    await service.run(2 * START_HOLD_SECONDS)
    service.machine.jump(MONTH)
    await service.run(SAVE_INTERVAL_SECONDS)
    await service.stop_for(5)
    assert service.is_held
    assert service.clock.state.ahead_seconds == pytest.approx(MONTH, abs=SAVE_INTERVAL_SECONDS)


async def test_a_worker_process_follows_the_service(service: _Service) -> None:
    follower = FollowingClock(service.machine, file=service.file, threads=_Inline())
    await service.run(2 * START_HOLD_SECONDS)
    await follower.check()
    assert follower.now() == follower.due() == service.machine.now()
    service.machine.jump(MONTH)
    assert follower.due() == service.machine.now() - MONTH, "before the service has said anything"
    await service.clock.check()
    await follower.check()
    assert (follower.now(), follower.due()) == (service.machine.now(), 0.0)


async def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, service: _Service) -> None:
    (tmp_path / "clock.json").write_text('{"time":')
    service.machine.jump(MONTH)
    service.start()
    assert service.clock.state == ClockState()


async def test_a_time_that_cannot_be_saved_is_an_outage_and_no_end(tmp_path: Path, service: _Service) -> None:
    (tmp_path / "clock.json").unlink()
    (tmp_path / "clock.json").mkdir()
    service.machine.advance(SAVE_INTERVAL_SECONDS)
    with pytest.raises(StoreDown, match="cannot be saved"):
        await service.clock.check()
