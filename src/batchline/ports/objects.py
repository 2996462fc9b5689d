"""What the pipeline needs of an object store."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol


class Writer(Protocol):
    """An object being written. It exists, whole and durable, once ``commit`` returned, and not before."""

    async def write(self, data: bytes) -> None: ...

    async def commit(self) -> None: ...

    async def abort(self) -> None: ...


class Objects(Protocol):
    """Bytes by key. Every call may raise ObjectsDown; reading may raise ObjectMissing."""

    async def put(self, key: str, data: bytes) -> None:
        """Durable when it returns."""

    async def create(self, key: str) -> Writer: ...

    async def accept(self, path: Path, key: str) -> None:
        """Take a file of ``scratch`` as an object, durably."""

    def scratch(self) -> AbstractAsyncContextManager[Path]:
        """A path on a local disk to write to, gone afterwards unless it was adopted."""

    def local(self, key: str) -> AbstractAsyncContextManager[Path]:
        """The object as a local file, to be read by a child process."""

    async def read(self, key: str, start: int, length: int) -> bytes: ...

    def stream(self, key: str, start: int, length: int) -> AsyncIterator[bytes]: ...

    async def delete(self, key: str) -> None:
        """Also fine when it is not there."""

    async def delete_all(self, prefix: str) -> None: ...

    async def names(self, prefix: str) -> list[str]:
        """The names one level below a prefix."""

    def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """All keys below a prefix, at most 1,000 at a time."""

    async def check(self) -> None:
        """Write, read and remove a few bytes."""
