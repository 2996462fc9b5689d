"""Locks exclude other processes, and end with the descriptor that took them."""

import os
import threading
from pathlib import Path

import pytest

from batchline.locks import AlreadyLocked, lock, try_lock


def test_a_file_that_is_locked_cannot_be_locked_again(tmp_path: Path) -> None:
    """F1: two processes must not serve the same folder."""
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        try_lock(first)
        with pytest.raises(AlreadyLocked):
            try_lock(second.fileno())


def test_a_lock_ends_with_its_file(tmp_path: Path) -> None:
    """A process that was killed leaves no lock behind."""
    with (tmp_path / "lock").open("w") as first:
        lock(first)
    with (tmp_path / "lock").open("w") as second:
        try_lock(second)


def test_a_folder_can_be_locked_by_a_descriptor(tmp_path: Path) -> None:
    """A backup locks the data folder itself, so that no lock file is left in it."""
    first, second = os.open(tmp_path, os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)
    try:
        try_lock(first)
        with pytest.raises(AlreadyLocked):
            try_lock(second)
    finally:
        os.close(first)
        os.close(second)


def test_waiting_for_a_lock_ends_when_it_is_free(tmp_path: Path) -> None:
    """Two runs that start at once make one key: the second waits for the first."""
    with (tmp_path / "lock").open("w") as first, (tmp_path / "lock").open("w") as second:
        lock(first)
        waiting = threading.Thread(target=lock, args=(second,))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        first.close()
        waiting.join(10)
        assert not waiting.is_alive()


def test_an_error_other_than_a_held_lock_is_raised_as_it_is(tmp_path: Path) -> None:
    """A file system without locks must not look like a lock that another process holds."""
    file = (tmp_path / "lock").open("w")
    descriptor = file.fileno()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        try_lock(descriptor)
