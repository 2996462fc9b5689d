"""Validates input files in child processes (`validation_child.py`).

One file takes most of a second, during which the event loop would be blocked.
"""

import os
import sys
from asyncio import wrap_future
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from types import ModuleType

from msgspec import msgpack

from batchline.domain.errors import ObjectMissing, ObjectsDown
from batchline.domain.limits import InputLimits
from batchline.domain.records import NewShard
from batchline.pipeline import validation_child
from batchline.pipeline.turns import Turns
from batchline.ports import Survey, TableForm, TableVerdict, Verdict

_SAFE_PATH = "PYTHONSAFEPATH"


class ValidationDied(Exception):
    """Two child processes in a row died while they validated one input file."""


class ValidationPool:
    """A Validator with a fixed number of child processes, which start when they are first needed, or by ``start``.

    A file waits at most for one file of every other project, and for those of its own project that came before it.
    """

    def __init__(self, count: int = 1) -> None:
        self._children = [_Child() for _ in range(count)]
        self._idle = list(self._children)
        self._turns = Turns(count)

    def start(self) -> None:
        """Start the child processes, so that the first file need not wait until they have imported their modules."""
        for child in self._children:
            child.start()

    async def validate(
        self, *, project_id: str, source: Path, work: Path, endpoint: str, limits: InputLimits
    ) -> Verdict:
        """Validate ``source`` and write its lines to ``work``.

        Raises ObjectMissing if ``source`` does not exist, ObjectsDown if the disk fails, and ValidationDied.
        """
        call = partial(validation_child.validate, source, work, endpoint, limits)
        return msgpack.decode(await self._run(project_id, call, source=source), type=Verdict)

    async def survey(self, *, project_id: str, work: Path, shards: list[NewShard]) -> Survey:
        """Return the survey of a work file. Raises ObjectsDown if the disk fails, and ValidationDied."""
        call = partial(validation_child.survey, work, msgpack.encode(shards))
        return msgpack.decode(await self._run(project_id, call, source=work), type=Survey)

    async def write_requests(
        self, *, project_id: str, source: Path, target: Path, form: TableForm, max_rows: int
    ) -> TableVerdict:
        """Write a request for each row of a table. Raises ObjectMissing, ObjectsDown and ValidationDied."""
        call = partial(validation_child.write_table_requests, source, target, msgpack.encode(form), max_rows)
        return msgpack.decode(await self._run(project_id, call, source=source), type=TableVerdict)

    async def digests(
        self, *, project_id: str, work: Path, shards: list[NewShard], endpoint: str, sent_as: bytes | None
    ) -> bytes:
        """Return the digests of all lines of a work file. Raises Damaged, ObjectsDown and ValidationDied."""
        call = partial(validation_child.digests, work, msgpack.encode(shards), project_id, endpoint, sent_as)
        return await self._run(project_id, call, source=work)

    async def _run(self, project_id: str, call: Callable[[], bytes], *, source: Path) -> bytes:
        async with self._turns.turn(project_id):
            child = self._idle.pop()
            try:
                return await _run_twice(child, call)
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

    def start(self) -> None:
        self._submit(bytes)

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
            # The child died earlier, over another file or while idle. This file still has both of its tries.
            self._pool = _new_pool()
            return self._pool.submit(call)


def _new_pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=_Context(), initializer=validation_child.begin)


class _Process(SpawnProcess):
    def start(self) -> None:
        # A spawned child runs the parent's main script again, because pickled functions may be defined there. The
        # functions for this child are defined in a module of their own. With an empty main module the child does not
        # import the whole service.
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            with _safe_path():
                super().start()
        finally:
            sys.modules["__main__"] = main


@contextmanager
def _safe_path() -> Iterator[None]:
    """Let Python processes that start meanwhile import nothing from the current folder, as with the flag -P."""
    former = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if former is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = former


class _Context(SpawnContext):
    Process = _Process
