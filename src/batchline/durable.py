"""Makes files and folders durable, so that they outlast a loss of power.

A new file needs two syncs: one of its bytes, and after it has its final name, one of the folder that holds the name.
"""

import fcntl
import os
import sys
from pathlib import Path


def sync(descriptor: int) -> None:
    """Return once everything written to a file, or every name in a folder, is on the disk."""
    if sys.platform == "darwin":
        # On macOS fsync() only reaches the drive's cache.
        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)


def sync_path(path: Path) -> None:
    """Sync a file or a folder by its path."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def replace(source: Path, target: Path) -> None:
    """Give a file that was synced its final name, durably and in place of any file of that name."""
    source.replace(target)
    sync_path(target.parent)
