"""``batchline adopt`` asks before it changes which objects belong to a database."""

import asyncio
from pathlib import Path

from click.testing import CliRunner, Result

from batchline.app.backends import open_both, open_store
from batchline.app.startup import folder_lock
from batchline.cli import main
from batchline.domain.identity import Identity
from batchline.settings import Settings


def _adopt(folder: Path, *flags: str, answer: str = "") -> Result:
    return CliRunner().invoke(main, ["adopt", f"--data-dir={folder}", *flags], input=answer)


def _identity(folder: Path) -> Identity:
    async def read() -> Identity:
        async with open_store(Settings(data_dir=folder)) as store:
            return await store.identity()

    return asyncio.run(read())


def test_nothing_changes_without_a_yes(tmp_path: Path) -> None:
    before = _identity(tmp_path)
    refused = _adopt(tmp_path, answer="n\n")
    assert refused.exit_code == 1
    assert f"the database {tmp_path}/batchline.sqlite and the folder {tmp_path}/objects" in refused.output
    assert _identity(tmp_path) == before


def test_both_get_a_new_identity(tmp_path: Path) -> None:
    """The service starts afterwards."""
    first = _adopt(tmp_path, answer="y\n")
    assert first.exit_code == 0, first.output
    before = _identity(tmp_path)
    assert _adopt(tmp_path, "--yes").exit_code == 0
    after = _identity(tmp_path)
    assert before.database_id != after.database_id
    assert [path.name for path in (tmp_path / "objects" / "identity").iterdir()] == [after.marker]

    async def start() -> None:
        async with open_both(Settings(data_dir=tmp_path)):
            pass

    asyncio.run(start())


def test_a_folder_that_is_served_is_refused(tmp_path: Path) -> None:
    with folder_lock(tmp_path):
        refused = _adopt(tmp_path, "--yes")
    assert refused.exit_code == 1
    assert "is served by another process" in refused.output
