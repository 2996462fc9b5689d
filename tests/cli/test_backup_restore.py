"""`batchline backup` and `batchline restore` as commands; tests/backup has what they do."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from batchline.cli import main
from tests.support.command_line import Shell


def test_a_backup_is_restored_into_another_folder(tmp_path: Path) -> None:
    old, new = Shell(tmp_path / "old"), Shell(tmp_path / "new")
    made = old.json("keys", "create", "--project", "search")
    file = str(tmp_path / "backup")
    assert old.text("backup", file).startswith(f"Backed up to {file}: ")
    assert "Start it with the same settings: batchline serve" in new.text("restore", file)
    assert [key["key_id"] for key in new.json("keys", "list")] == [made["key_id"]]


def test_a_backup_overwrites_a_file_only_if_forced(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "data")
    shell.json("keys", "create")
    file = tmp_path / "backup"
    file.write_text("something else")
    assert shell.refusal("backup", str(file))[0] == 1
    assert file.read_text() == "something else"
    shell.text("backup", str(file), "--force")


@pytest.mark.parametrize(
    "variable", [{"BATCHLINE_DATABASE_URL": "postgresql://h/n"}, {"BATCHLINE_STORAGE_URL": "s3://bucket"}]
)
def test_a_backup_of_a_service_outside_the_folder_is_refused(tmp_path: Path, variable: dict[str, str]) -> None:
    """It would be only a part of the data."""
    result = CliRunner(env=variable).invoke(main, ["backup", str(tmp_path / "backup")])
    assert result.exit_code == 1
    assert "back up the database first, and then the bucket" in result.stderr


def test_a_missing_backup_is_an_error_of_the_command_line(tmp_path: Path) -> None:
    code, text = Shell(tmp_path / "data").refusal("restore", str(tmp_path / "missing"))
    assert code == 1
    assert text.startswith("Error: ")
