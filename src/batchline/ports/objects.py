"""Defines what the service needs of an object store."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol


class Writer(Protocol):
    """An object being written. It exists, whole and durable, once ``commit`` returned, and not before."""

    async def write(self, data: bytes) -> None:
        """Append bytes to the object."""

    async def commit(self) -> None:
        """Make the object durable and visible under its key."""

    async def abort(self) -> None:
        """Discard what was written."""


class Objects(Protocol):
    """Bytes by key. Every call may raise ObjectsDown; reading may raise ObjectMissing."""

    async def put(self, key: str, data: bytes) -> None:
        """Write a whole object; it is durable when the call returns."""

    async def create(self, key: str, *, spooled: bool = False) -> Writer:
        """Return a writer for an object that is written piece by piece.

        With ``spooled``, its bytes are kept on a local disk until the commit: for an object that takes as long as a
        client likes, of which there may be many.
        """

    async def accept(self, path: Path, key: str) -> None:
        """Turn a file of ``scratch`` into an object, durably."""

    def scratch(self) -> AbstractAsyncContextManager[Path]:
        """Provide a path on a local disk to write to; its file is deleted afterwards unless it was accepted."""

    def local(self, key: str) -> AbstractAsyncContextManager[Path]:
        """Provide the object as a local file that a child process can read."""

    async def read(self, key: str, start: int, length: int) -> bytes:
        """Return a range of the object; fewer bytes if the object ends before."""

    def stream(self, key: str, start: int, length: int) -> AsyncIterator[bytes]:
        """Yield a range of the object in chunks."""

    async def delete(self, key: str) -> None:
        """Delete the object if it exists."""

    async def delete_all(self, prefix: str) -> None:
        """Delete every object below a prefix."""

    async def names(self, prefix: str) -> list[str]:
        """Return the names one level below a prefix."""

    def keys(self, prefix: str) -> AsyncIterator[list[str]]:
        """Yield all keys below a prefix, at most 1,000 at a time."""

    async def check(self) -> None:
        """Write, read and delete a few bytes."""
