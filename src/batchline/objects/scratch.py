"""A folder on a local disk for files that are only passing through, when the objects themselves are elsewhere.

Each process has a folder of its own there, held by a lock that goes with the process however it ends: so whoever
starts can tell what the dead left from what the living use.
"""

import fcntl
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from threading import Lock

from batchline.domain.errors import ObjectsDown
from batchline.ports import Random, Threads

_LOCK = "lock"


class Scratch:
    def __init__(self, root: Path, *, threads: Threads, random: Random) -> None:
        self._root = root.absolute()
        self._own = self._root / random.bytes(8).hex()
        self._threads, self._random = threads, random
        self._lock: FileIO | None = None
        self._making = Lock()

    @asynccontextmanager
    async def file(self) -> AsyncIterator[Path]:
        """A path to write to, gone afterwards."""
        await self._threads.run(self._make)
        path = self._own / self._random.bytes(16).hex()
        try:
            yield path
        finally:
            await self._threads.run(partial(_remove_quietly, path))

    async def clear(self) -> None:
        """Remove what dead processes left."""
        await self._threads.run(self._clear)

    def close(self) -> None:
        if self._lock is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._lock.close()
            self._lock = None

    def _make(self) -> None:
        with self._making, disk():
            while self._lock is None:
                self._lock = _hold(self._own)

    def _clear(self) -> None:
        with disk():
            for folder in self._root.glob(f"*/{_LOCK}"):
                _remove_if_dead(folder.parent)


@contextmanager
def disk() -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        raise ObjectsDown(f"The local disk failed: {failure}") from failure


def _hold(folder: Path) -> FileIO | None:
    """None when somebody took the folder for a dead one's before it was locked."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        lock = FileIO(folder / _LOCK, "w")
    except FileNotFoundError:
        return None
    fcntl.flock(lock, fcntl.LOCK_EX)
    if (folder / _LOCK).exists():
        return lock
    lock.close()
    return None


def _remove_if_dead(folder: Path) -> None:
    # Whoever else clears may be faster.
    with suppress(FileNotFoundError), FileIO(folder / _LOCK) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        shutil.rmtree(folder, ignore_errors=True)


def _remove_quietly(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
