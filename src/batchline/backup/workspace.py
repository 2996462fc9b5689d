"""A folder inside the data folder for a backup or a restore that is under way."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchline.backup.manifest import TransferError

_NAME = "transfer"


@contextmanager
def workspace(data_dir: Path) -> Iterator[Path]:
    """Empty at first and gone afterwards; what one that died has left goes first."""
    with _held(data_dir):
        folder = data_dir / _NAME
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def clear_workspace(data_dir: Path) -> None:
    """Unless somebody works there. What another user has left is for that user's next backup to remove."""
    with suppress(TransferError, OSError), _held(data_dir):
        shutil.rmtree(data_dir / _NAME, ignore_errors=True)


@contextmanager
def _held(data_dir: Path) -> Iterator[None]:
    """The folder itself is locked: there is no file to be left behind, and the service's own lock is another one."""
    descriptor = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise TransferError(f"Another backup or restore is using the data folder {data_dir}.") from None
    try:
        yield
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """What was renamed in it stays so."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
