"""The key of local runs (F4)."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from batchline.cli.connection.credentials import Credentials, local_credentials
from batchline.cli.loading import load_settings
from tests.support.command_line import Shell


def _credentials(folder: Path) -> Credentials:
    return local_credentials(load_settings(data_dir=str(folder)))


def test_one_key_is_created_per_folder_and_readable_only_by_its_owner(tmp_path: Path) -> None:
    first = _credentials(tmp_path)
    assert _credentials(tmp_path) == first
    assert stat.S_IMODE((tmp_path / "run.key").stat().st_mode) == 0o600
    [key] = Shell(tmp_path).json("keys", "list")
    assert (key["project"], key["project_id"]) == ("run", first.project_id)


def test_a_revoked_key_is_replaced_in_the_same_project(tmp_path: Path) -> None:
    """F3: revoking it ends what it began, not later runs."""
    first = _credentials(tmp_path)
    Shell(tmp_path).text("keys", "revoke", first.api_key)
    second = _credentials(tmp_path)
    assert second.api_key != first.api_key
    assert second.project_id == first.project_id


def test_runs_that_start_at_once_create_one_key(tmp_path: Path) -> None:
    _credentials(tmp_path)
    (tmp_path / "run.key").unlink()
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(_credentials, [tmp_path] * 4))
    assert len({each.api_key for each in made}) == 1
