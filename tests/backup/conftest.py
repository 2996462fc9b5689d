"""Provides a backup of a busy data folder, and every kind of store that it can be restored to."""

from pathlib import Path

import pytest

from tests.support.busy_folder import Busy, Folder
from tests.support.restore_targets import Target, back_up


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "data")


@pytest.fixture
def busy(folder: Folder) -> Busy:
    return Busy(folder)


@pytest.fixture
def archive(busy: Busy, folder: Folder, tmp_path: Path) -> Path:
    path = tmp_path / "backup.tar"
    back_up(folder.path, path)
    return path


@pytest.fixture
def to_folder(tmp_path: Path) -> Target:
    return Target(tmp_path / "restored")


@pytest.fixture(params=["sqlite+folder", "postgres+bucket"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    return target_of(request, tmp_path, request.param)


@pytest.fixture(params=["sqlite+bucket", "postgres+folder"])
def mixed_target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    return target_of(request, tmp_path, request.param)


def target_of(request: pytest.FixtureRequest, tmp_path: Path, kinds: str) -> Target:
    settings = {}
    if "postgres" in kinds:
        settings["database_url"] = request.getfixturevalue("postgres").new_database(empty=True)
    if "bucket" in kinds:
        settings["storage_url"] = request.getfixturevalue("bucket").new_url()
    return Target(tmp_path / "restored", **settings)
