"""Provides the clock, randomness and threads of the machine. Only this module uses them directly."""

import asyncio
import random
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


_UPTIME_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
"""The clock that goes on while the machine is suspended: a separate one on Linux, the monotonic one on macOS."""


class SystemClock:
    """The clock of the machine."""

    now = staticmethod(time.time)
    steady = staticmethod(time.monotonic)

    def uptime(self) -> float:
        """Return the seconds since the machine started, including those in which it was suspended."""
        return time.clock_gettime(_UPTIME_CLOCK)

    async def sleep(self, seconds: float) -> None:
        """Wait without blocking the event loop."""
        await asyncio.sleep(seconds)


class CommandClock(SystemClock):
    """The clock of a command. It has the time of the machine, and nothing expires by it."""

    def due(self) -> float:
        """Return 0: nothing is due."""
        return 0.0


class SystemRandom:
    """The random numbers of the machine."""

    def bytes(self, count: int) -> bytes:
        """Return bytes that are fit for secrets."""
        return secrets.token_bytes(count)

    def uniform(self, low: float, high: float) -> float:
        """Return a number between the two bounds."""
        return random.uniform(low, high)


class ThreadPool:
    """A few threads for blocking calls. With one thread, calls run in the order in which they were made."""

    def __init__(self, count: int, *, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call in a thread and return its result."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def close(self) -> None:
        """Wait for the running calls and end the threads."""
        self._pool.shutdown(wait=True)
