"""Taking a backup: it shows one moment, it is whole or does not exist, and it leaves nothing behind."""

import errno
import json
import os
import sqlite3
import stat
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import batchline.backup.backup as backup_module
from batchline.backup.archive import ArchiveWriter
from batchline.backup.rows import opened
from batchline.backup.workspace import clear_workspace, workspace
from tests.support.busy_folder import Busy, Folder
from tests.support.clocks import SettableClock
from tests.support.restore_targets import Target, back_up, try_to_back_up
from tests.support.stores import NOW


def _manifest(archive: Path) -> Any:
    with tarfile.open(archive) as tar:
        file = tar.extractfile("manifest.json")
        assert file is not None
        return json.load(file)


def _names(archive: Path) -> list[str]:
    with tarfile.open(archive) as tar:
        return tar.getnames()


def test_it_says_what_it_holds(busy: Busy, folder: Folder, tmp_path: Path) -> None:
    printed = back_up(folder.path, tmp_path / "a.tar")
    assert f"Backed up to {tmp_path / 'a.tar'}: 6 batches, 5 of them open; 3 files; 8 objects of " in printed
    manifest = _manifest(tmp_path / "a.tar")
    with tarfile.open(tmp_path / "a.tar") as tar:
        objects = [member for member in tar if member.name.startswith("objects/")]
    assert (manifest["objects"], manifest["object_bytes"]) == (len(objects), sum(each.size for each in objects))
    assert manifest["lost"] == []


def test_it_is_for_nobody_but_its_owner(archive: Path) -> None:
    """A backup holds the data of all tenants, so only its owner may read it."""
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600


def test_it_leaves_nothing_in_the_folder(busy: Busy, folder: Folder, tmp_path: Path) -> None:
    before = sorted(path.name for path in folder.path.iterdir())
    back_up(folder.path, tmp_path / "a.tar")
    assert sorted(path.name for path in folder.path.iterdir()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.tar", "data"]


def test_a_file_is_overwritten_only_when_that_is_wanted(archive: Path, folder: Folder) -> None:
    before = archive.read_bytes()
    refused = try_to_back_up(folder.path, archive)
    assert refused.exit_code == 1
    assert "exists already" in refused.stderr
    assert archive.read_bytes() == before
    folder.play(lambda world: world.owner("another"))
    back_up(folder.path, archive, "--force")
    assert archive.read_bytes() != before


def test_a_folder_without_a_service_is_told_and_stays_so(tmp_path: Path) -> None:
    refused = try_to_back_up(tmp_path / "nothing", tmp_path / "a.tar")
    assert refused.exit_code == 1
    assert "There is no service in the data folder" in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [("BATCHLINE_DATABASE_URL", "postgresql://127.0.0.1/none"), ("BATCHLINE_STORAGE_URL", "s3://none")],
)
def test_a_service_on_shared_backends_is_not_half_backed_up(
    busy: Busy, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    refused = try_to_back_up(folder.path, tmp_path / "a.tar")
    assert refused.exit_code == 1
    assert "with their own tools" in refused.stderr
    assert not (tmp_path / "a.tar").exists()


def test_what_comes_and_goes_around_the_moment_is_in_it(
    busy: Busy, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C12: objects that are created late and deleted at once after the snapshot are in the backup.

    One is a file that was created after the others were linked; one is the work of a batch that ends right then.
    """
    moment = backup_module._nothing_committed
    half = busy.batches["half run"]

    @contextmanager
    def busy_moment(writer: Any) -> Iterator[None]:
        file = folder.play(lambda world: world.stored(busy.owner, id="file-brief", object_key="uploads/file-brief"))
        folder.put(file.object_key, b"brief")
        with moment(writer):
            yield
        folder.play(lambda world: world.store.delete_file(file.project_id, file.id, at=NOW))
        for key in (file.object_key, f"work/{half}/1", f"segments/{half}/other-1"):
            (folder.path / "objects" / key).unlink()

    monkeypatch.setattr(backup_module, "_nothing_committed", busy_moment)
    back_up(folder.path, tmp_path / "a.tar")
    assert _manifest(tmp_path / "a.tar")["lost"] == []
    target = Target(tmp_path / "restored")
    assert target.restore(tmp_path / "a.tar").exit_code == 0
    assert target.read("uploads/file-brief") == b"brief"
    assert target.read(f"segments/{half}/other-1") == b"+"


def test_nothing_can_be_committed_in_the_moment(
    busy: Busy, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a row could be deleted between the snapshot and the link to its object."""
    link, refused = backup_module._Staging._link_needed, []

    def try_to_commit(staging: Any, reader: Any, marks: Any) -> Any:
        if marks.file:
            with opened(folder.path / "batchline.sqlite") as other:
                other.execute("PRAGMA busy_timeout = 0")
                try:
                    other.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError as error:
                    refused.append(str(error))
        return link(staging, reader, marks)

    monkeypatch.setattr(backup_module._Staging, "_link_needed", try_to_commit)
    back_up(folder.path, tmp_path / "a.tar")
    assert refused == ["database is locked"]


def test_what_changes_while_it_is_written_is_not_in_it(busy: Busy, folder: Folder, tmp_path: Path) -> None:
    """The service may commit while the backup is written; the backup shows the moment before."""
    deleted: list[str] = []

    def delete_everything(done: int, total: int) -> None:
        if not deleted:
            deleted.append("all")
            for path in (folder.path / "objects").rglob("*"):
                if path.is_file():
                    path.unlink()
            folder.play(lambda world: world.owner("too late"))

    backup_module.back_up(
        folder.path, tmp_path / "a.tar", overwrite=False, clock=SettableClock(), progress=delete_everything
    )
    target = Target(tmp_path / "restored")
    assert target.restore(tmp_path / "a.tar").exit_code == 0
    assert target.read("uploads/file-0001") == b"one"
    assert [project.name for project in target.in_store(lambda store: store.projects())] == ["alpha"]


def test_objects_are_copied_where_they_cannot_be_linked(
    busy: Busy, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, source: Path) -> None:
        source.stat()
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    back_up(folder.path, tmp_path / "a.tar")
    target = Target(tmp_path / "restored")
    assert target.restore(tmp_path / "a.tar").exit_code == 0
    assert target.read("uploads/file-0002") == b"two"


def test_an_object_that_was_lost_before_is_named_and_does_not_hinder(
    busy: Busy, folder: Folder, tmp_path: Path
) -> None:
    """Everything else is backed up and can be restored."""
    (folder.path / "objects" / "uploads" / "file-0001").unlink()
    result = try_to_back_up(folder.path, tmp_path / "a.tar")
    assert result.exit_code == 0
    assert "Warning: the object uploads/file-0001 was already missing before the backup" in result.stderr
    target = Target(tmp_path / "restored")
    assert target.restore(tmp_path / "a.tar").exit_code == 0
    assert target.read("uploads/file-0002") == b"two"


def test_one_that_fails_leaves_no_file_and_nothing_in_the_folder(
    busy: Busy, folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(ArchiveWriter, "seal", full)
    refused = try_to_back_up(folder.path, tmp_path / "a.tar")
    assert refused.exit_code == 1
    assert "No space left on device" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    assert not (folder.path / "transfer").exists()


def test_two_at_once_are_refused(busy: Busy, folder: Folder, tmp_path: Path) -> None:
    with workspace(folder.path):
        refused = try_to_back_up(folder.path, tmp_path / "a.tar")
    assert refused.exit_code == 1
    assert "Another backup or restore" in refused.stderr


def test_what_a_dead_one_left_goes_with_the_next_or_at_the_next_start(
    busy: Busy, folder: Folder, tmp_path: Path
) -> None:
    left = folder.path / "transfer" / "objects" / "uploads" / "file-old"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"old")
    back_up(folder.path, tmp_path / "a.tar")
    assert not left.exists()
    assert not [name for name in _names(tmp_path / "a.tar") if "file-old" in name]
    left.parent.mkdir(parents=True)
    Target(folder.path).in_objects(lambda objects: objects.check())
    assert not left.parent.exists()


def test_a_start_leaves_a_backup_that_is_under_way_alone(folder: Folder) -> None:
    with workspace(folder.path) as under_way:
        (under_way / "object").touch()
        clear_workspace(folder.path)
        assert (under_way / "object").exists()
