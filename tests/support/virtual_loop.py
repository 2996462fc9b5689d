"""One event loop on virtual time, for tests of a single part."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.simulation.virtual import Loop, Time, VirtualClock

T = TypeVar("T")


class VirtualLoop:
    """Runs callbacks in the order of their virtual times, and never waits."""

    def __init__(self) -> None:
        self.time = Time()
        self.loop, self.clock = Loop(self.time), VirtualClock(self.time)

    @property
    def now(self) -> float:
        return self.time.now

    def run(self, coroutine: Coroutine[Any, Any, T], *, seconds: float = 1000.0) -> T:
        """Run a coroutine to its end, which must come within so many virtual seconds."""
        task, until = self.loop.create_task(coroutine), self.now + seconds
        while not task.done():
            due = self.loop.next_due()
            assert due is not None, "nothing is scheduled, so the coroutine never ends"
            assert due <= until, "the coroutine did not end in time"
            self._step(due)
        return task.result()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the loop, and run what it causes without any delay."""
        self.loop.call_soon(function)
        self.advance(0)

    def advance(self, seconds: float) -> None:
        """Run everything that is due within so many virtual seconds."""
        until = self.now + seconds
        while (due := self.loop.next_due()) is not None and due <= until:
            self._step(due)
        self.time.now = until

    def close(self) -> None:
        """Cancel all tasks and close the loop."""
        self.loop.discarded = True
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        while not all(task.done() for task in tasks) and (due := self.loop.next_due()) is not None:
            self._step(due)
        self.loop.close()

    def _step(self, due: float) -> None:
        self.time.now = max(self.now, due)
        self.loop.step()
