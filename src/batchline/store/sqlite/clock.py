"""The clock of a service on one machine, which does not believe the machine's clock at once.

A wall clock may be wrong: before NTP has set it, after a mistyped date, in a virtual machine. Expiring a batch or
deleting a file because of it cannot be undone. So the wall clock is compared with two other times: the uptime of the
machine, which never jumps, and the highest time that was trusted so far, which is kept in a file::

    wall clock              | times that are written | what is due
    ------------------------|------------------------|---------------------------------------------------------
    as expected             | the wall clock         | by the wall clock
    behind the expected     | the expected time      | by the wall clock, so rather too late
    ahead, while running    | the wall clock         | nothing, until the clock comes back or an operator accepts it
    ahead, after a start    | the wall clock         | nothing for an hour, unless an operator accepts the clock

After a start a clock that is far ahead is usually right, since the service was stopped for so long. But it may also be
a clock that NTP has not set yet. An hour is enough for NTP, and a service that was off for a month has lost nothing by
one more hour.

Written times are the later of the two clocks and decisions follow the earlier. So whichever of them turns out to be
right, nothing has ended too early.
"""

import math
from pathlib import Path
from threading import Lock

from msgspec import DecodeError, Struct
from msgspec.json import decode as decode_json
from msgspec.json import encode as encode_json

from batchline import durable
from batchline.domain.errors import StoreDown
from batchline.ports import ClockState, MachineClock, Threads

TOLERANCE_SECONDS = 60.0
"""The most that the wall clock may differ from the expected time. NTP corrects a clock that was set by far less."""
ANCHOR_SECONDS = 3600.0
"""The time after which the comparison with the uptime starts again from the wall clock. A clock that runs too fast
gains at most the tolerance in this time."""
START_GAP_SECONDS = 15 * 60.0
"""The longest stop of a service that causes no doubt about the clock: longer than a reboot, and not longer than the
smallest difference between two time zones, which is 15 minutes (India and Nepal)."""
START_HOLD_SECONDS = 3600.0
"""The time for which a clock that is ahead after a start must run evenly before it is trusted."""
SAVE_INTERVAL_SECONDS = 60.0

_FILE, _ACCEPTANCE = "clock.json", "clock-accepted"


class SavedTime(Struct, frozen=True, kw_only=True):
    """The trusted time at one moment."""

    time: float
    uptime: float
    held: bool = False


class ClockFile:
    """The files of the data folder with the trusted time, and with the operator's acceptance of the wall clock."""

    def __init__(self, folder: Path) -> None:
        self._path, self._acceptance = folder / _FILE, folder / _ACCEPTANCE

    def load(self) -> SavedTime | None:
        """Return what was saved last, or None if the file does not exist or is damaged."""
        try:
            return decode_json(self._path.read_bytes(), type=SavedTime)
        except (FileNotFoundError, DecodeError):
            return None

    def save(self, saved: SavedTime) -> None:
        """Replace what was saved, durably."""
        temporary = self._path.with_suffix(".tmp")
        temporary.write_bytes(encode_json(saved))
        durable.sync_path(temporary)
        durable.replace(temporary, self._path)

    def accept(self) -> None:
        """Let the service trust the wall clock at its next check."""
        self._acceptance.touch()

    def take_acceptance(self) -> bool:
        """Return whether an operator has accepted the wall clock since the last call."""
        try:
            self._acceptance.unlink()
        except FileNotFoundError:
            return False
        return True


class _Hold(Struct, kw_only=True):
    """A wall clock that is ahead and not trusted."""

    offset: float
    """Its distance to the uptime."""
    since: float
    """The uptime at which it came to this distance."""
    ends: bool
    """Whether it is trusted after a while."""


class TrustedClock:
    """The WatchedClock of the process that holds the data folder. It may be used from any thread."""

    def __init__(self, machine: MachineClock, *, file: ClockFile, threads: Threads) -> None:
        self._machine, self._file, self._threads = machine, file, threads
        self.steady, self.sleep = machine.steady, machine.sleep
        self._lock = Lock()
        self._hold: _Hold | None = None
        self._saved_at, self._saved_hold = -math.inf, False
        wall, uptime, saved = machine.now(), machine.uptime(), file.load()
        self._started = uptime
        known = saved is None or -TOLERANCE_SECONDS <= wall - saved.time <= START_GAP_SECONDS
        self._allowed = TOLERANCE_SECONDS if known else START_GAP_SECONDS
        """The seconds that the wall clock may be ahead. If it is in doubt from the start, the right time is later than
        the saved one by the length of the stop."""
        self._anchor(wall if saved is None or known else saved.time, uptime)

    def now(self) -> float:
        with self._lock:
            wall, expected = self._compare()
            return max(wall, expected)

    def due(self) -> float:
        with self._lock:
            wall, expected = self._compare()
            return 0.0 if self._hold else min(wall, expected)

    @property
    def state(self) -> ClockState:
        with self._lock:
            wall, expected = self._compare()
            return ClockState(
                ahead_seconds=wall - expected, held=self._hold is not None, problem=self._problem(wall - expected)
            )

    async def check(self) -> ClockState:
        return await self._threads.run(self._check)

    def _check(self) -> ClockState:
        try:
            if self._file.take_acceptance():
                self._accept()
            self._save()
        except OSError as error:
            raise StoreDown(f"the trusted time cannot be saved: {error}") from error
        return self.state

    def _accept(self) -> None:
        with self._lock:
            self._trust(self._machine.now(), self._machine.uptime())

    def _save(self) -> None:
        """Save the trusted time if that was long ago, or if a hold has begun or ended."""
        with self._lock:
            _, expected = self._compare()
            uptime, held = self._machine.uptime(), self._hold is not None
        if uptime - self._saved_at >= SAVE_INTERVAL_SECONDS or held is not self._saved_hold:
            self._file.save(SavedTime(time=expected, uptime=uptime, held=held))
            self._saved_at, self._saved_hold = uptime, held

    def _compare(self) -> tuple[float, float]:
        """Return the wall clock and the expected time, which is the wall clock itself if the two agree."""
        wall, uptime = self._machine.now(), self._machine.uptime()
        expected = uptime + self._offset
        ahead = wall - expected
        if -TOLERANCE_SECONDS <= ahead <= self._allowed:
            if self._hold or self._allowed > TOLERANCE_SECONDS or uptime - self._anchored_at >= ANCHOR_SECONDS:
                self._trust(wall, uptime)
            return wall, wall
        if ahead < 0:
            self._hold = None
        elif self._hold_until_even(wall - uptime, uptime):
            self._trust(wall, uptime)
            return wall, wall
        return wall, expected

    def _hold_until_even(self, offset: float, uptime: float) -> bool:
        """Hold a clock that is ahead, and return True once it ran evenly for long enough to be trusted."""
        hold = self._hold
        if hold is None or abs(offset - hold.offset) > TOLERANCE_SECONDS:
            ends = hold.ends if hold is not None else uptime - self._started < START_HOLD_SECONDS
            self._hold = _Hold(offset=offset, since=uptime, ends=ends)
            return False
        return hold.ends and uptime - hold.since >= START_HOLD_SECONDS

    def _trust(self, wall: float, uptime: float) -> None:
        self._hold, self._allowed = None, TOLERANCE_SECONDS
        self._anchor(wall, uptime)

    def _anchor(self, time: float, uptime: float) -> None:
        self._offset, self._anchored_at = time - uptime, uptime

    def _problem(self, ahead: float) -> str | None:
        if self._hold is not None:
            ends = "for an hour, unless the clock is set back" if self._hold.ends else "until the clock is set back"
            return (
                f"the clock is {length(ahead)} ahead of the expected time; nothing expires and nothing is deleted "
                f"{ends} or `batchline clock accept` says that it is right"
            )
        if ahead < -TOLERANCE_SECONDS:
            return (
                f"the clock is {length(-ahead)} behind the latest time seen; everything expires later by as much, "
                "unless the clock is set or `batchline clock accept` says that it is right"
            )
        return None


class FollowingClock:
    """The StoreClock of a worker process: it has the trusted time from the process that started it."""

    def __init__(self, machine: MachineClock, *, file: ClockFile, threads: Threads) -> None:
        self._machine, self._file, self._threads = machine, file, threads
        self.steady, self.sleep = machine.steady, machine.sleep
        self._saved = file.load()

    def now(self) -> float:
        return max(self._readings())

    def due(self) -> float:
        return 0.0 if self._saved is not None and self._saved.held else min(self._readings())

    @property
    def state(self) -> ClockState:
        """An empty state, because the process that started this one reports the state of the clock."""
        return ClockState()

    async def check(self) -> ClockState:
        """Read the trusted time again."""
        try:
            self._saved = await self._threads.run(self._file.load)
        except OSError as error:
            raise StoreDown(f"the trusted time cannot be read: {error}") from error
        return self.state

    def _readings(self) -> tuple[float, float]:
        wall = self._machine.now()
        if self._saved is None:
            return wall, wall
        expected = self._saved.time + self._machine.uptime() - self._saved.uptime
        return (wall, wall) if abs(wall - expected) <= TOLERANCE_SECONDS else (wall, expected)


def length(seconds: float) -> str:
    """Return a length of time for a message."""
    for size, unit in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"
