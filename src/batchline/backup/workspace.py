"""Provides a folder inside the data folder for a backup or a restore that is under way."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from batchline.backup.manifest import TransferError
from batchline.locks import AlreadyLocked, try_lock

_NAME = "transfer"


@contextmanager
def workspace(data_dir: Path) -> Iterator[Path]:
    """Provide an empty folder that is removed afterwards. Raise TransferError if another process uses it.

    What a process that died left there is removed first.
    """
    with _locked(data_dir):
        folder = data_dir / _NAME
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def clear_workspace(data_dir: Path) -> None:
    """Remove what a process that died left, unless a backup or a restore is under way.

    What another user's process left stays until that user's next backup removes it.
    """
    with suppress(TransferError, OSError), _locked(data_dir):
        shutil.rmtree(data_dir / _NAME, ignore_errors=True)


@contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    """Lock the folder itself: no lock file is left behind, and the service's own lock is a different one."""
    descriptor = os.open(data_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try_lock(descriptor)
    except AlreadyLocked:
        os.close(descriptor)
        raise TransferError(f"Another backup or restore is using the data folder {data_dir}.") from None
    try:
        yield
    finally:
        os.close(descriptor)
