"""Keeps objects in a folder.

An object that has its key is whole and on the disk: bytes are written to a temporary file, which is synced and renamed,
and the folder that now holds its name is synced too.
"""

import errno
import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from io import FileIO
from itertools import islice
from operator import attrgetter
from pathlib import Path
from threading import Lock

from batchline.domain.errors import ObjectMissing, ObjectsDown
from batchline.durable import sync, sync_path
from batchline.objects.keys import TEMPORARY, components
from batchline.ports import Random, Threads

_CHUNK_BYTES = 256 * 1024
_PAGE_KEYS = 200
_MAX_DURABLE_FOLDERS = 1024
"""The folders that are remembered as durable. Each batch has its own, and to sync one again costs little."""
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class LocalObjects:
    """The objects of one process and its child processes.

    The lock of the data folder keeps other processes away. All of them read and put. Only the process that holds the
    lock removes objects, and clears what an earlier process left.
    """

    def __init__(self, root: Path, threads: Threads, random: Random) -> None:
        self._folder = _Folder(root.absolute())
        self._threads = threads
        self._random = random

    async def put(self, key: str, data: bytes) -> None:
        draft = self._draft(key)
        await self._threads.run(partial(draft.put, data))

    async def create(self, key: str, *, spooled: bool = False) -> "LocalWriter":
        # Bytes go to the disk at once, spooled or not.
        return LocalWriter(self._draft(key), self._threads)

    async def accept(self, path: Path, key: str) -> None:
        await self._threads.run(partial(self._folder.accept, path, self._folder.path(key)))

    @asynccontextmanager
    async def scratch(self) -> AsyncIterator[Path]:
        path = self._temporary_path()
        await self._threads.run(self._folder.make_temporary)
        try:
            yield path
        finally:
            await self._threads.run(partial(_remove_quietly, path))

    @asynccontextmanager
    async def local(self, key: str) -> AsyncIterator[Path]:
        path = self._folder.path(key)
        await self._threads.run(partial(_require, path))
        yield path

    async def read(self, key: str, start: int, length: int) -> bytes:
        return await self._threads.run(partial(_read, self._folder.path(key), start, length))

    async def stream(self, key: str, start: int, length: int) -> AsyncIterator[bytes]:
        with await self._threads.run(partial(_open, self._folder.path(key))) as file:
            end = start + length
            while start < end and (chunk := await self._threads.run(partial(_read_chunk, file, start, end))):
                yield chunk
                start += len(chunk)

    async def delete(self, key: str) -> None:
        await self._threads.run(partial(self._folder.delete, self._folder.path(key)))

    async def delete_all(self, prefix: str) -> None:
        await self._threads.run(partial(self._folder.delete_all, self._folder.path(prefix)))

    async def names(self, prefix: str) -> list[str]:
        path = self._folder.path(prefix)
        return await self._threads.run(lambda: [entry.name for entry in _entries(path)])

    async def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        keys = _keys(self._folder.path(prefix), prefix)
        while page := await self._threads.run(lambda: list(islice(keys, _PAGE_KEYS))):
            yield page

    async def check(self) -> None:
        await self._threads.run(partial(self._folder.probe, self._temporary_path()))

    async def clear_temporary(self) -> None:
        """Remove what an earlier process left half-written. Call it at the start, before anything is written."""
        await self._threads.run(self._folder.clear_temporary)

    def _draft(self, key: str) -> "_Draft":
        return _Draft(self._folder, self._temporary_path(), self._folder.path(key))

    def _temporary_path(self) -> Path:
        return self._folder.temporary / self._random.bytes(16).hex()


class LocalWriter:
    """A Writer for one object."""

    def __init__(self, draft: "_Draft", threads: Threads) -> None:
        self._draft = draft
        self._threads = threads

    async def write(self, data: bytes) -> None:
        await self._threads.run(partial(self._draft.write, data))

    async def commit(self) -> None:
        await self._threads.run(self._draft.commit)

    async def abort(self) -> None:
        await self._threads.run(self._draft.discard)


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as failure:
        raise ObjectsDown(str(failure)) from failure


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except _ABSENT as failure:
        raise ObjectMissing(str(failure)) from failure
    except OSError as failure:
        raise ObjectsDown(str(failure)) from failure


class _Folder:
    """The paths of keys, and the folders that are known to outlast a loss of power."""

    def __init__(self, root: Path) -> None:
        self.temporary = root / TEMPORARY
        self._root = root
        self._durable: set[str] = set()
        self._folders_lock = Lock()
        """Held while folders are created and removed, so that none is removed between its creation and its use."""

    def path(self, key: str) -> Path:
        return self._root.joinpath(*components(key))

    @_writing()
    def accept(self, path: Path, target: Path) -> None:
        sync_path(path)
        self.publish(path, target)

    def publish(self, temporary: Path, target: Path) -> None:
        try:
            self._place(temporary, target)
        except FileNotFoundError:
            # Another process has removed folders that are remembered here as existing.
            self._forget(target.parent)
            self._place(temporary, target)
        sync_path(target.parent)

    @_writing()
    def delete(self, path: Path) -> None:
        with suppress(FileNotFoundError, NotADirectoryError):
            path.unlink()
        if self._root in path.parent.parent.parents:
            self._remove_if_empty(path.parent)

    @_writing()
    def delete_all(self, folder: Path) -> None:
        with self._folders_lock:
            _remove_tree(folder)
            below = f"{folder}{os.sep}"
            self._durable = {known for known in self._durable if not f"{known}{os.sep}".startswith(below)}

    @_writing()
    def make_temporary(self) -> None:
        with self._folders_lock:
            self._make_durable(self._root)
        self.temporary.mkdir(exist_ok=True)

    @_writing()
    def clear_temporary(self) -> None:
        _remove_tree(self.temporary)

    @_writing()
    def probe(self, path: Path) -> None:
        self.make_temporary()
        try:
            path.write_bytes(path.name.encode())
            sync_path(path)
            if path.read_bytes() != path.name.encode():
                raise OSError("What was written is not what is read")
        finally:
            path.unlink(missing_ok=True)

    def _place(self, temporary: Path, target: Path) -> None:
        with self._folders_lock:
            self._make_durable(target.parent)
            temporary.replace(target)

    def _remove_if_empty(self, folder: Path) -> None:
        """Remove the folder of a batch with its last object. There would be one more with every batch."""
        with self._folders_lock, suppress(OSError):
            folder.rmdir()
            self._durable.discard(str(folder))

    def _forget(self, folder: Path) -> None:
        with self._folders_lock:
            self._durable -= {str(folder), *map(str, folder.parents)}

    def _make_durable(self, folder: Path) -> None:
        # A folder that exists may have a name that was never synced: its creator may have died before that.
        if str(folder) in self._durable:
            return
        if self._root in folder.parents or not folder.parent.is_dir():
            self._make_durable(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_path(folder.parent)
        if len(self._durable) >= _MAX_DURABLE_FOLDERS:
            self._durable.clear()
        self._durable.add(str(folder))


class _Draft:
    """A temporary file that becomes an object. It is opened at the first write, so an unused draft leaves no file."""

    def __init__(self, folder: _Folder, temporary: Path, target: Path) -> None:
        self._folder = folder
        self._temporary = temporary
        self._target = target
        self._file: FileIO | None = None
        self._closed = False
        self._step_lock = Lock()
        """Held by each step: a write whose caller was cancelled continues in its thread and needs its file open."""

    def put(self, data: bytes) -> None:
        self.write(data)
        self.commit()

    def write(self, data: bytes) -> None:
        with self._step():
            _write_all(self._open(), data)

    def commit(self) -> None:
        with self._step():
            sync(self._open().fileno())
            self._close()
            self._folder.publish(self._temporary, self._target)

    def discard(self) -> None:
        with self._step_lock, _writing():
            self._close()
            self._temporary.unlink(missing_ok=True)

    @contextmanager
    def _step(self) -> Iterator[None]:
        """Run one step. If it fails, remove the half-written file and close the draft."""
        with self._step_lock, _writing():
            if self._closed:
                raise ValueError("This draft is closed")
            try:
                yield
            except OSError:
                self._close()
                _remove_quietly(self._temporary)
                raise

    def _open(self) -> FileIO:
        if self._file is None:
            self._folder.make_temporary()
            self._file = FileIO(self._temporary, "x")
        return self._file

    def _close(self) -> None:
        self._closed = True
        if self._file is not None:
            self._file.close()


def _write_all(file: FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _remove_quietly(path: Path) -> None:
    # A file that cannot be removed now is removed at the next start.
    with suppress(OSError):
        path.unlink()


def _remove_tree(folder: Path) -> None:
    """Remove a folder. shutil.rmtree would stop half-way if another thread removed an object meanwhile."""
    try:
        entries = list(folder.iterdir())
    except _ABSENT:
        return
    for entry in entries:
        if entry.is_dir():
            _remove_tree(entry)
        else:
            entry.unlink(missing_ok=True)
    folder.rmdir()


@_reading()
def _require(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(path)


@_reading()
def _open(path: Path) -> FileIO:
    return FileIO(path, opener=_open_regular)


@_reading()
def _read(path: Path, start: int, length: int) -> bytes:
    with open(path, "rb", opener=_open_regular) as file:
        file.seek(start)
        return file.read(length)


def _open_regular(path: str, flags: int) -> int:
    """Open a file for reading. Raise FileNotFoundError if it is a pipe or a device, which might never be readable."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "not a regular file", path)
    return descriptor


@_reading()
def _read_chunk(file: FileIO, start: int, end: int) -> bytes:
    # By position: after a cancelled call closed the file, its descriptor may already belong to another file.
    return os.pread(file.fileno(), min(_CHUNK_BYTES, end - start), start)


def _keys(path: str | Path, prefix: str) -> Iterator[str]:
    for entry in _entries(path):
        key = f"{prefix}/{entry.name}"
        if entry.is_dir():
            yield from _keys(entry.path, key)
        else:
            yield key


@_writing()
def _entries(path: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return sorted(entries, key=attrgetter("name"))
    except _ABSENT:
        return []
