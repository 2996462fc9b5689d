"""Decides how many processes of `batchline serve` run lines.

It adds one while all of them are busy, and removes one when the rest would still have CPU time to spare.
"""

from collections.abc import Sequence
from time import process_time

from batchline.ports import Clock

_SHORTEST_INTERVAL_SECONDS = 0.001


class Autoscaler:
    """Decides, about once per second, whether a process is added or removed.

    ``max_processes`` includes the serving process itself. A process is busy from ``busy_cpu_share`` of a core on, and
    all must be busy in ``busy_checks`` checks in a row: starting a process costs half a second of a core, which a few
    seconds of work would not repay. It scales down only if the remaining processes would stay below
    ``spare_cpu_share`` each, and did so for ``idle_seconds`` (hysteresis).
    """

    def __init__(
        self,
        *,
        max_processes: int,
        busy_cpu_share: float = 0.85,
        busy_checks: int = 4,
        spare_cpu_share: float = 0.6,
        idle_seconds: float = 10.0,
    ) -> None:
        self._max_processes = max_processes
        self._busy_cpu_share, self._busy_checks, self._spare_cpu_share = busy_cpu_share, busy_checks, spare_cpu_share
        self._idle_seconds = idle_seconds
        self._busy_in_a_row = 0
        self._idle_since: float | None = None

    def check(self, cpu_shares: Sequence[float], *, runs_lines: bool, at: float) -> int:
        """Return 1 to add a process, -1 to remove one, else 0, given the share of a core that each one used."""
        all_busy = runs_lines and min(cpu_shares) >= self._busy_cpu_share
        self._busy_in_a_row = self._busy_in_a_row + 1 if all_busy else 0
        if self._busy_in_a_row >= self._busy_checks and len(cpu_shares) < self._max_processes:
            self._busy_in_a_row = 0
            return 1
        return -1 if self._note_idle(cpu_shares, at) else 0

    def _note_idle(self, cpu_shares: Sequence[float], at: float) -> bool:
        """Note whether one process fewer would do, and return True if that was so for long enough."""
        if len(cpu_shares) == 1 or sum(cpu_shares) / (len(cpu_shares) - 1) >= self._spare_cpu_share:
            self._idle_since = None
            return False
        if self._idle_since is None:
            self._idle_since = at
        if at - self._idle_since < self._idle_seconds:
            return False
        self._idle_since = None
        return True


class CpuMeter:
    """Measures the share of one core that this process used since the last reading."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._at, self._used = clock.steady(), process_time()

    def read(self) -> float:
        at, used = self._clock.steady(), process_time()
        share = (used - self._used) / max(at - self._at, _SHORTEST_INTERVAL_SECONDS)
        self._at, self._used = at, used
        return share
