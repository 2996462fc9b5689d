"""The store and the objects that the settings name, and what a process is told if they cannot be opened: F1, F5."""

from pathlib import Path

import pytest
from pydantic import SecretStr

from batchline.app.backends import migrate_store, open_objects, open_shared_objects, open_store
from batchline.app.startup import StartupError, folder_lock
from batchline.objects.local import LocalObjects
from batchline.settings import Settings

pytestmark = pytest.mark.anyio


async def test_without_urls_everything_is_in_the_data_folder(tmp_path: Path) -> None:
    """F1: one folder is all that a service on one machine needs."""
    settings = Settings(data_dir=tmp_path / "data")
    async with open_store(settings) as store, open_objects(settings) as objects:
        assert await store.keys() == []
        assert isinstance(objects, LocalObjects)
        await objects.put("work/batch_1/1", b"x")
    names = {path.name for path in settings.data_dir.iterdir()}
    assert {"batchline.sqlite", "objects"} <= names


async def test_a_migrated_store_is_named_for_the_message(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    assert await migrate_store(settings) == f"the database in {tmp_path}"


async def test_a_folder_in_use_is_not_migrated(tmp_path: Path) -> None:
    """F1: a service of the former version may be running on it."""
    with folder_lock(tmp_path), pytest.raises(StartupError, match="served by another process"):
        await migrate_store(Settings(data_dir=tmp_path))
    assert not (tmp_path / "batchline.sqlite").exists()


async def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    """F5: the message names the file."""
    (tmp_path / "batchline.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(StartupError, match=r"The database .*batchline\.sqlite cannot be opened"):
        async with open_store(Settings(data_dir=tmp_path)):
            pass
    with pytest.raises(StartupError, match=r"The database .*batchline\.sqlite cannot be opened"):
        await migrate_store(Settings(data_dir=tmp_path))


async def test_a_database_that_cannot_be_reached_is_refused_by_its_setting(tmp_path: Path) -> None:
    """F5: the message names the variable, for a process that opens it and for one that migrates it."""
    settings = Settings(data_dir=tmp_path, database_url=SecretStr("postgresql://postgres@127.0.0.1:1/none"))
    with pytest.raises(StartupError, match="BATCHLINE_DATABASE_URL cannot be used"):
        async with open_store(settings):
            pass
    with pytest.raises(StartupError, match="BATCHLINE_DATABASE_URL cannot be used"):
        await migrate_store(settings)


async def test_what_an_earlier_process_left_is_cleared_by_the_holder_of_the_folder_alone(tmp_path: Path) -> None:
    """B2: a worker process opens the objects beside the serving one, whose files in the making must stay."""
    settings = Settings(data_dir=tmp_path)
    async with open_objects(settings) as objects:
        writer = await objects.create("uploads/file-1")
        await writer.write(b"x")
        before = _files(tmp_path)
        async with open_shared_objects(settings):
            assert _files(tmp_path) == before != []
        async with open_objects(settings):
            assert _files(tmp_path) == []
        await writer.abort()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "objects").rglob("*") if path.is_file())
