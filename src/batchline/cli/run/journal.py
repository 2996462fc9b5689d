"""Records the progress of a run beside its output, so that a killed run resumes with the same batch.

Every step appends one line with the whole state, so a line that a crash cut off costs one step at most. The file is
locked as long as the run is alive.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import DecodeError, Struct, field
from msgspec.json import decode as decode_json
from msgspec.json import encode as encode_json

from batchline.durable import sync
from batchline.locks import try_lock


class JournalEntry(Struct, frozen=True, kw_only=True):
    """The state of a run."""

    input_digest: str
    endpoint: str
    target: str = field(name="place")
    """The server's URL, or the data folder."""

    begun_at: float
    idempotency_key: str
    create: dict[str, Any] = field(default_factory=dict)
    """Further fields of the create: metadata, and what belongs to this service alone."""
    file_id: str | None = None
    batch_id: str | None = None


_FIRST_BYTES = b'{"input_digest":'


class JournalUnusable(Exception):
    """The journal cannot be used. The message says why, for the user."""


class Journal:
    """The journal of one output file, locked by this run."""

    def __init__(self, path: Path) -> None:
        """Open or create it. Raise JournalUnusable if another run holds it, or if the file is not a journal."""
        self.path = path
        self._removed = False
        try:
            self._fd = _locked(path)
        except OSError as failure:
            raise JournalUnusable(f"{path} cannot be written: {failure.strerror}") from failure
        try:
            self.entry = _last_entry(self._fd)
        except DecodeError:
            os.close(self._fd)
            raise JournalUnusable(f"{path} was not written by this command; move it elsewhere") from None

    def write(self, entry: JournalEntry) -> None:
        """Append an entry. It is durable when this returns."""
        os.write(self._fd, encode_json(entry) + b"\n")
        sync(self._fd)
        self.entry = entry

    def remove(self) -> None:
        """Delete the file because the run has ended. A file that appears there later belongs to another run."""
        if not self._removed:
            self._removed = True
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Release the file, and delete it if it has no entry."""
        if self.entry is None:
            self.remove()
        os.close(self._fd)


def _locked(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            try_lock(fd)
        except OSError:
            os.close(fd)
            raise JournalUnusable(f"Another run is working on this output ({path})") from None
        # The run that held the lock may have deleted the file in the meantime; then open a new one.
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)


def _last_entry(fd: int) -> JournalEntry | None:
    """Return the last complete entry, and cut off what follows it."""
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    whole = data[: data.rfind(b"\n") + 1]
    if not whole and not _FIRST_BYTES.startswith(data[: len(_FIRST_BYTES)]):
        raise DecodeError("not a journal")
    lines = whole.splitlines()
    entry = decode_json(lines[-1], type=JournalEntry) if lines else None
    os.ftruncate(fd, len(whole))
    return entry
