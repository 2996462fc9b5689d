"""Measures CPU and memory of processes with all their children, and how busy the machine was meanwhile."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import monotonic
from typing import Any

import psutil  # type: ignore[import-untyped]
from msgspec import Struct

_SAMPLE_SECONDS = 0.2


class Peak(Struct, frozen=True, kw_only=True):
    """The most bytes that the processes had together."""

    rss: int = 0
    uss: int = 0
    pss: int = 0

    def maximum(self, other: "Peak") -> "Peak":
        """Return the larger of each figure."""
        return Peak(rss=max(self.rss, other.rss), uss=max(self.uss, other.uss), pss=max(self.pss, other.pss))


class Meter:
    """Measures from its creation until ``stop``."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._roots = [psutil.Process(pid) for pid in pids]
        self._stopped = Event()
        self._thread = Thread(target=self._sample)
        self._started, self._busy_before = monotonic(), _busy_seconds()
        self._cpu_before = self._cpu()
        self.peak = self._memory()
        self.seconds = self.cpu_seconds = 0.0
        self.machine_cores = 0.0
        """Busy cores on average, by any process of the machine; much more than the measured processes used means that
        something else disturbed the run."""
        self._thread.start()

    def stop_clock(self) -> None:
        """Stop the time; CPU is still counted until ``stop``."""
        self.seconds = monotonic() - self._started
        self.machine_cores = (_busy_seconds() - self._busy_before) / self.seconds

    def stop(self) -> None:
        if not self.seconds:
            self.stop_clock()
        self.cpu_seconds = self._cpu() - self._cpu_before
        self._stopped.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stopped.wait(_SAMPLE_SECONDS):
            self.peak = self.peak.maximum(self._memory())

    def _cpu(self) -> float:
        """Return the CPU time; that of an ended child is in its parent's, so none is lost or counted twice."""
        return sum(sum(times[:4]) for times in self._each("cpu_times"))

    def _memory(self) -> Peak:
        infos = self._each("memory_full_info")
        return Peak(
            rss=sum(each.rss for each in infos),
            uss=sum(each.uss for each in infos),
            pss=sum(getattr(each, "pss", 0) for each in infos),
        )

    def _each(self, method: str) -> list[Any]:
        values = []
        for process in self._processes():
            with suppress(psutil.NoSuchProcess):
                values.append(getattr(process, method)())
        return values

    def _processes(self) -> list[psutil.Process]:
        processes = []
        for root in self._roots:
            with suppress(psutil.NoSuchProcess):
                processes += [root, *root.children(recursive=True)]
        return processes


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
