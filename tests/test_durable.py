"""What was synced is on the disk: the right call on every platform, and the folder after the file."""

import fcntl
import os
import sys
from pathlib import Path

import pytest

from batchline import durable


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The sync calls that reach the operating system, each with the inode it is for."""
    made: list[tuple[str, int]] = []

    def inode(descriptor: int) -> int:
        return os.fstat(descriptor).st_ino

    monkeypatch.setattr(os, "fsync", lambda descriptor: made.append(("fsync", inode(descriptor))))
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", 51, raising=False)
    monkeypatch.setattr(fcntl, "fcntl", lambda descriptor, command: made.append((str(command), inode(descriptor))))
    return made


@pytest.mark.parametrize(("platform", "call"), [("linux", "fsync"), ("darwin", "51")])
def test_a_sync_reaches_the_disk_on_every_platform(
    tmp_path: Path, calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, platform: str, call: str
) -> None:
    """B2: on macOS fsync ends at the drive's cache, and only F_FULLFSYNC goes on to the disk."""
    monkeypatch.setattr(sys, "platform", platform)
    path = tmp_path / "file"
    with path.open("wb") as file:
        durable.sync(file.fileno())
    durable.sync_path(tmp_path)
    assert calls == [(call, path.stat().st_ino), (call, tmp_path.stat().st_ino)]


def test_a_replaced_file_has_its_name_before_the_folder_is_synced(
    tmp_path: Path, calls: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B2: a sync of the folder before the rename would leave the new name to chance."""
    monkeypatch.setattr(sys, "platform", "linux")
    source, target = tmp_path / "new", tmp_path / "folder" / "old"
    target.parent.mkdir()
    source.write_text("new")
    target.write_text("old")
    seen: list[str] = []
    record = os.fsync

    def look_at_target(descriptor: int) -> None:
        seen.append(target.read_text())
        record(descriptor)

    monkeypatch.setattr(os, "fsync", look_at_target)
    durable.replace(source, target)
    assert seen == ["new"]
    assert calls == [("fsync", target.parent.stat().st_ino)]
    assert not source.exists()


def test_no_descriptor_is_left_open_when_a_sync_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails for an hour must not use up the descriptors."""

    def fail(descriptor: int) -> None:
        raise OSError(f"EIO on {descriptor}")

    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "fsync", fail)
    before = set(Path("/dev/fd").iterdir())
    with pytest.raises(OSError, match="EIO"):
        durable.sync_path(tmp_path)
    assert set(Path("/dev/fd").iterdir()) == before
