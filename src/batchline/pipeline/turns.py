"""Gives a fixed number of places to waiting tasks, one project after the other."""

from asyncio import CancelledError, Future, get_running_loop
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turns:
    """Places that projects share.

    A task waits at most for one task of every other project, and for those of its own project that came before it.
    """

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: dict[str, deque[Future[None]]] = {}
        """The waiting tasks, by project. The project whose turn is next comes first. No queue is empty."""

    @asynccontextmanager
    async def turn(self, project_id: str) -> AsyncIterator[None]:
        """Hold a place."""
        await self._wait(project_id)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, project_id: str) -> None:
        if self._free:
            self._free -= 1
            return
        waiter: Future[None] = get_running_loop().create_future()
        self._waiting.setdefault(project_id, deque()).append(waiter)
        try:
            await waiter
        except CancelledError:
            if not waiter.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Give a place that became free to the next project."""
        while self._waiting:
            project_id = next(iter(self._waiting))
            queue = self._waiting.pop(project_id)
            waiter = queue.popleft()
            if queue:
                self._waiting[project_id] = queue
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1
