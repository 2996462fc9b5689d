"""Keeps temporary files on a local disk for objects that are stored elsewhere.

Each process has its own folder, with a lock that ends with the process, however that ends. So a process that starts can
distinguish the folders of dead processes from those in use.
"""

import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from io import FileIO
from pathlib import Path
from threading import Lock

from batchline.domain.errors import ObjectsDown
from batchline.locks import AlreadyLocked, lock, try_lock
from batchline.ports import Random, Threads

_LOCK = "lock"


class Scratch:
    """The scratch folder of this process, which is created when it is first needed."""

    def __init__(self, root: Path, *, threads: Threads, random: Random) -> None:
        self._root = root.absolute()
        self._own = self._root / random.bytes(8).hex()
        self._threads, self._random = threads, random
        self._lock: FileIO | None = None
        self._making = Lock()

    @asynccontextmanager
    async def file(self) -> AsyncIterator[Path]:
        """Provide a path to write to; its file is removed afterwards."""
        await self._threads.run(self._make)
        path = self._own / self._random.bytes(16).hex()
        try:
            yield path
        finally:
            await self._threads.run(partial(_remove_quietly, path))

    async def clear(self) -> None:
        """Remove the folders of dead processes."""
        await self._threads.run(self._clear)

    def close(self) -> None:
        """Remove the folder of this process."""
        if self._lock is not None:
            shutil.rmtree(self._own, ignore_errors=True)
            self._lock.close()
            self._lock = None

    def _make(self) -> None:
        with self._making, disk():
            while self._lock is None:
                self._lock = _make_and_lock(self._own)

    def _clear(self) -> None:
        with disk():
            for folder in self._root.glob(f"*/{_LOCK}"):
                _remove_if_dead(folder.parent)


@contextmanager
def disk() -> Iterator[None]:
    """Raise ObjectsDown in place of an OSError."""
    try:
        yield
    except OSError as failure:
        raise ObjectsDown(f"The local disk failed: {failure}") from failure


def _make_and_lock(folder: Path) -> FileIO | None:
    """Create and lock a folder; return None if another process removed it as abandoned before it was locked."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        file = FileIO(folder / _LOCK, "w")
    except FileNotFoundError:
        return None
    lock(file)
    if (folder / _LOCK).exists():
        return file
    file.close()
    return None


def _remove_if_dead(folder: Path) -> None:
    # Another process may clear at the same time and be faster.
    with suppress(FileNotFoundError), FileIO(folder / _LOCK) as file:
        try:
            try_lock(file)
        except AlreadyLocked:
            return
        shutil.rmtree(folder, ignore_errors=True)


def _remove_quietly(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
