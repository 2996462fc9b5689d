"""How many processes run lines: one more while those that do cannot keep up, one fewer once they easily would."""

from collections.abc import Sequence
from time import process_time

from batchline.ports import Clock

_BUSY = 0.85
"""Of a core. Beyond it a process is what lines wait for."""
_BUSY_LOOKS = 4
"""To begin takes a process half a second of a core, which a few seconds of work would not repay."""
_ROOM = 0.6
"""Of a core, for each of one fewer: what is taken away must not be called back at once."""
_IDLE_SECONDS = 10.0
_SHORTEST_SECONDS = 0.001


class Staffing:
    """Looks on about once a second. ``most`` counts the process that looks too."""

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._busy_looks = 0
        self._idle_since: float | None = None

    def look(self, busy: Sequence[float], *, runs_lines: bool, at: float) -> int:
        """How many more processes there should be, or fewer, given what part of a core each has used."""
        self._busy_looks = self._busy_looks + 1 if runs_lines and min(busy) >= _BUSY else 0
        if self._busy_looks >= _BUSY_LOOKS and len(busy) < self._most:
            self._busy_looks = 0
            return 1
        return -1 if self._idles(busy, at) else 0

    def _idles(self, busy: Sequence[float], at: float) -> bool:
        if len(busy) == 1 or sum(busy) / (len(busy) - 1) >= _ROOM:
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = at
        if at - self._idle_since < _IDLE_SECONDS:
            return False
        self._idle_since = None
        return True


class Meter:
    """What part of a core this process used since it was last asked."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at, self._used = clock.steady(), process_time()

    def read(self) -> float:
        at, used = self._clock.steady(), process_time()
        share = (used - self._used) / max(at - self._at, _SHORTEST_SECONDS)
        self._at, self._used = at, used
        return share
