"""Validates input files in child processes.

One file takes most of a second, for which the event loop would stand still.
A child imports this module too, so it imports nothing that validation does not need.
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
    """Two child processes in a row died while they validated one input file."""


class ValidationPool:
    """A Validator with a fixed number of child processes, which start when they are first needed."""

    def __init__(self, count: int = 1) -> None:
        self._children = [_Child() for _ in range(count)]
        self._idle = list(self._children)
        self._free = Semaphore(count)

    async def validate(self, *, source: Path, work: Path, endpoint: str, limits: InputLimits) -> Verdict:
        """Validate ``source`` and write its lines to ``work``.

        Raises ObjectMissing if ``source`` does not exist, ObjectsDown if the disk fails, and ValidationDied.
        """
        call = partial(_validate, source, work, endpoint, limits)
        async with self._free:
            child = self._idle.pop()
            try:
                return msgpack.decode(await _run_twice(child, call), type=Verdict)
            except OSError as failure:
                raise _as_objects_error(failure, source) from failure
            finally:
                self._idle.append(child)

    def close(self) -> None:
        """End the child processes. One that is busy finishes its file first."""
        for child in self._children:
            child.close()


def _as_objects_error(failure: OSError, source: Path) -> ObjectMissing | ObjectsDown:
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
    """One child process, in a pool of its own, so that a file that kills it does not end the validation of another."""

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
            # It died earlier, over another file or while idle. That spends none of the two tries of this file.
            self._pool = _new_pool()
            return self._pool.submit(call)


def _new_pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=_Context(), initializer=_begin)


class _Process(SpawnProcess):
    def start(self) -> None:
        # A spawned child runs the parent's main script again, because pickled functions may be defined there. The
        # functions for this child are defined in this module. With an empty main module the child does not import
        # the whole service.
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = main


class _Context(SpawnContext):
    Process = _Process


def _begin() -> None:
    # A terminal sends Ctrl-C to the whole process group, but the parent decides when its children end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _validate(source: Path, work: Path, endpoint: str, limits: InputLimits) -> bytes:
    # Thousands of shards are returned as one bytes object and not as thousands of pickled ones.
    return msgpack.encode(validate_file(source=source, work=work, endpoint=endpoint, limits=limits))
