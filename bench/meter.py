"""CPU and memory of processes and all their children, and what the rest of the machine did meanwhile."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import monotonic
from typing import Any

import psutil  # type: ignore[import-untyped]
from msgspec import Struct

_EVERY_SECONDS = 0.2


class Peak(Struct, frozen=True, kw_only=True):
    """Most bytes that the processes had together."""

    rss: int = 0
    uss: int = 0
    pss: int = 0

    def or_more(self, other: "Peak") -> "Peak":
        return Peak(rss=max(self.rss, other.rss), uss=max(self.uss, other.uss), pss=max(self.pss, other.pss))


class Meter:
    """Measures from its making until ``stop``."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._roots = [psutil.Process(pid) for pid in pids]
        self._over = Event()
        self._thread = Thread(target=self._keep_looking)
        self._began, self._busy_before = monotonic(), _busy_seconds()
        self._cpu_before = self._cpu()
        self.peak = self._memory()
        self.seconds = self.cpu_seconds = 0.0
        self.machine_cores = 0.0
        """Busy on average, whoever kept them so: near what the processes themselves used if nobody disturbed."""
        self._thread.start()

    def lap(self) -> None:
        """What follows belongs to the cost, no more to the time it took."""
        self.seconds = monotonic() - self._began
        self.machine_cores = (_busy_seconds() - self._busy_before) / self.seconds

    def stop(self) -> None:
        if not self.seconds:
            self.lap()
        self.cpu_seconds = self._cpu() - self._cpu_before
        self._over.set()
        self._thread.join()

    def _keep_looking(self) -> None:
        while not self._over.wait(_EVERY_SECONDS):
            self.peak = self.peak.or_more(self._memory())

    def _cpu(self) -> float:
        """A child that ended has left its time to its parent, so nothing is lost and nothing counted twice."""
        return sum(sum(times[:4]) for times in self._each("cpu_times"))

    def _memory(self) -> Peak:
        found = self._each("memory_full_info")
        return Peak(
            rss=sum(each.rss for each in found),
            uss=sum(each.uss for each in found),
            pss=sum(getattr(each, "pss", 0) for each in found),
        )

    def _each(self, what: str) -> list[Any]:
        told = []
        for process in self._family():
            with suppress(psutil.NoSuchProcess):
                told.append(getattr(process, what)())
        return told

    def _family(self) -> list[psutil.Process]:
        found = []
        for root in self._roots:
            with suppress(psutil.NoSuchProcess):
                found += [root, *root.children(recursive=True)]
        return found


@contextmanager
def metering(*pids: int) -> Iterator[Meter]:
    meter = Meter(pids)
    try:
        yield meter
    finally:
        meter.stop()


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times[:8]) - times.idle - getattr(times, "iowait", 0))
