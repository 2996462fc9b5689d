"""What a run has reached, beside its output: a run that was killed goes on where it was, with the same batch.

Every step appends one line with everything, so that a line that was cut off by a crash costs one step at most. The
file is locked as long as the run lives.
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from msgspec import DecodeError, Struct
from msgspec.json import decode as decode_json
from msgspec.json import encode as encode_json


class JournalEntry(Struct, frozen=True, kw_only=True):
    input_digest: str
    endpoint: str
    place: str
    """The server's URL, or the data folder."""

    begun_at: float
    idempotency_key: str
    file_id: str | None = None
    batch_id: str | None = None


_BEGINNING = b'{"input_digest":'


class JournalUnusable(Exception):
    """Why, for a person to read."""


class Journal:
    def __init__(self, path: Path) -> None:
        """Raises JournalUnusable when another run is at work on it, or it is no journal."""
        self.path = path
        self._removed = False
        try:
            self._fd = _locked(path)
        except OSError as failure:
            raise JournalUnusable(f"{path} cannot be written: {failure.strerror}") from failure
        try:
            self.job = _last(self._fd)
        except DecodeError:
            os.close(self._fd)
            raise JournalUnusable(f"{path} was not written by this command; move it away") from None

    def write(self, job: JournalEntry) -> None:
        """Durable when it returns."""
        os.write(self._fd, encode_json(job) + b"\n")
        os.fsync(self._fd)
        self.job = job

    def remove(self) -> None:
        """The job is over. Whatever lies there afterwards is another run's."""
        if not self._removed:
            self._removed = True
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """One that holds nothing is not left lying about."""
        if self.job is None:
            self.remove()
        os.close(self._fd)


def _locked(path: Path) -> int:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise JournalUnusable(f"Another run is at work on this output ({path})") from None
        # The run that held it may have removed it in between; then this is nobody's file any more.
        with suppress(FileNotFoundError):
            if path.stat().st_ino == os.fstat(fd).st_ino:
                return fd
        os.close(fd)


def _last(fd: int) -> JournalEntry | None:
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    whole = data[: data.rfind(b"\n") + 1]
    if not whole and not _BEGINNING.startswith(data[: len(_BEGINNING)]):
        raise DecodeError("not ours")
    lines = whole.splitlines()
    job = decode_json(lines[-1], type=JournalEntry) if lines else None
    os.ftruncate(fd, len(whole))
    return job
