"""Validation in child processes: it holds the interpreter for most of a second, which the event loop cannot spare.

A child imports this module too, so it asks for nothing that validation does not need.
"""

import os
import signal
import sys
from asyncio import Semaphore, wrap_future
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import parent_process
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from threading import Thread
from types import ModuleType

from msgspec import msgpack

from batchline.domain.errors import ObjectMissing, ObjectsDown
from batchline.domain.limits import InputLimits
from batchline.pipeline.validate import validate_file
from batchline.ports import Verdict


class ValidationDied(Exception):
    """Two children in a row died over one input file."""


class ValidationPool:
    """A Validator whose children start when they are first needed."""

    def __init__(self, count: int = 1) -> None:
        self._children = [_Child() for _ in range(count)]
        self._idle = list(self._children)
        self._free = Semaphore(count)

    async def validate(self, *, source: Path, work: Path, endpoint: str, limits: InputLimits) -> Verdict:
        """Raises ObjectMissing without ``source``, ObjectsDown when the disk fails, ValidationDied."""
        call = partial(_validate, source, work, endpoint, limits)
        async with self._free:
            child = self._idle.pop()
            try:
                return msgpack.decode(await _run_twice(child, call), type=Verdict)
            except OSError as failure:
                raise _explained(failure, source) from failure
            finally:
                self._idle.append(child)

    def close(self) -> None:
        """End the children; one that is at work finishes its file first."""
        for child in self._children:
            child.close()


def _explained(failure: OSError, source: Path) -> ObjectMissing | ObjectsDown:
    if isinstance(failure, FileNotFoundError) and failure.filename == str(source):
        return ObjectMissing(str(failure))
    return ObjectsDown(str(failure))


async def _run_twice(child: "_Child", call: Callable[[], bytes]) -> bytes:
    try:
        return await child.run(call)
    except BrokenProcessPool:
        pass
    try:
        return await child.run(call)
    except BrokenProcessPool as failure:
        raise ValidationDied("Two processes died over one input file") from failure


class _Child:
    """One process, in a pool of its own: a file that kills it takes down no other file's validation."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    async def run(self, call: Callable[[], bytes]) -> bytes:
        return await wrap_future(self._submit(call))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _submit(self, call: Callable[[], bytes]) -> Future[bytes]:
        if self._pool is None:
            self._pool = _new_pool()
        try:
            return self._pool.submit(call)
        except BrokenProcessPool:
            # It died before, over another file or over none: that costs this one none of its tries.
            self._pool = _new_pool()
            return self._pool.submit(call)


def _new_pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=_Context(), initializer=_begin)


class _Process(SpawnProcess):
    def start(self) -> None:
        # A spawned child runs the parent's main script again, for functions pickled from there. Ours come from here:
        # without a script to find, the child is spared the imports of the whole service.
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main


class _Context(SpawnContext):
    Process = _Process


def _begin() -> None:
    # A terminal sends Ctrl-C to the whole group; when children end is for the parent to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _validate(source: Path, work: Path, endpoint: str, limits: InputLimits) -> bytes:
    # Thousands of shards cross the border as one string of bytes, not as thousands of pickled objects.
    return msgpack.encode(validate_file(source=source, work=work, endpoint=endpoint, limits=limits))
