"""Locks files between processes.

A lock belongs to an open descriptor and ends with it, and so with its process, however that ends. The file stays, and
its existence means nothing. Locks exclude one another, but not readers or writers that take none.
"""

import fcntl
from typing import Protocol


class HasDescriptor(Protocol):
    """An open file."""

    def fileno(self) -> int:
        """Return the file's descriptor."""


class AlreadyLocked(OSError):
    """Another process holds the lock."""


def lock(file: int | HasDescriptor) -> None:
    """Lock an open file, and wait for as long as another process holds the lock."""
    fcntl.flock(file, fcntl.LOCK_EX)


def try_lock(file: int | HasDescriptor) -> None:
    """Lock an open file. Raise AlreadyLocked at once if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise AlreadyLocked from error
