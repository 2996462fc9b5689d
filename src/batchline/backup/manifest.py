"""Defines the manifest of a backup, and the error of backups and restores."""

from collections.abc import Callable

from msgspec import Struct

FORMAT = 1

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in total."""


class TransferError(Exception):
    """A backup was not taken, or nothing was restored. The text tells a person the cause and the remedy."""


class Manifest(Struct, frozen=True, kw_only=True):
    """The first member of a backup: what the backup holds."""

    format: int = FORMAT
    version: str
    """The version of the program that took the backup."""
    taken_at: int
    batches: int
    open_batches: int
    files: int
    objects: int
    object_bytes: int
    lost: list[str] = []
    """Keys of objects that rows refer to, but that did not exist when the backup was taken."""
