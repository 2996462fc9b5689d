"""What a role refuses before it opens anything: F1."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from pydantic import SecretStr

from batchline.app import roles
from batchline.app.startup import StartupError, folder_lock
from batchline.settings import Settings
from batchline.upstream.embedded.download import Progress
from tests.support.service import await_end, chat_lines, running_mock, running_service, submit

pytestmark = pytest.mark.anyio
Role = Callable[[Settings, Progress], Awaitable[None]]


def _ignore(_name: str, _done: int, _total: int) -> None:
    pass


@pytest.mark.parametrize("role", [roles.api, roles.worker])
async def test_a_role_of_a_fleet_needs_what_is_shared(role: Role, tmp_path: Path) -> None:
    """F1: both settings that are missing are named, and the command that needs neither."""
    with pytest.raises(StartupError) as refused:
        await role(Settings(data_dir=tmp_path), _ignore)
    for name in ("BATCHLINE_DATABASE_URL", "BATCHLINE_STORAGE_URL", "`batchline serve`"):
        assert name in str(refused.value)


@pytest.mark.parametrize("role", [roles.api, roles.worker])
async def test_only_the_missing_setting_is_named(role: Role, tmp_path: Path) -> None:
    """F1"""
    settings = Settings(data_dir=tmp_path, database_url=SecretStr("postgresql://postgres@127.0.0.1:1/none"))
    with pytest.raises(StartupError) as refused:
        await role(settings, _ignore)
    assert "BATCHLINE_STORAGE_URL" in str(refused.value)
    assert "BATCHLINE_DATABASE_URL" not in str(refused.value)


async def test_a_service_refuses_a_folder_that_another_one_serves(tmp_path: Path) -> None:
    """F1: before it opens the database or listens."""
    with folder_lock(tmp_path), pytest.raises(StartupError, match="is served by another process"):
        await roles.serve(Settings(data_dir=tmp_path, port=0), _ignore)
    assert not (tmp_path / "batchline.sqlite").exists()


@pytest.mark.rule("F1", "Only the owner can read what a service writes, also in a folder that existed.")
def test_what_a_service_writes_is_private_in_a_folder_that_existed(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    with running_mock() as mock, running_service(tmp_path, mock.url) as service:
        client = service.client()
        assert await_end(client, submit(client, chat_lines(["one"])).id).status == "completed"
        written = [path for path in data.rglob("*") if path.exists()]
        modes = {path.name: path.stat().st_mode & 0o777 for path in written}
        assert any(path.is_dir() for path in written)
        assert {name: mode for name, mode in modes.items() if mode & 0o077} == {}
