"""What a backup says of itself, and why one cannot be taken or used."""

from collections.abc import Callable

from msgspec import Struct

FORMAT = 1

Progress = Callable[[int, int], None]
"""Bytes done, and bytes in all."""


class TransferError(Exception):
    """Why there is no backup, or nothing was restored, for a person to read."""


class Manifest(Struct, frozen=True, kw_only=True):
    """The first member of a backup."""

    format: int = FORMAT
    version: str
    """Of the program that took it."""
    taken_at: int
    batches: int
    open_batches: int
    files: int
    objects: int
    object_bytes: int
    lost: list[str] = []
    """Objects that rows stand for, but that were gone when the backup was taken."""

    @property
    def summary(self) -> str:
        return (
            f"{self.batches} batches, {self.open_batches} of them open; {self.files} files; "
            f"{self.objects} objects of {self.object_bytes:,} bytes"
        )
