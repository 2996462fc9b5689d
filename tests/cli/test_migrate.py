"""Commands of a new version on a data folder of the former one: none migrates it but `migrate` and `serve` (F1)."""

from pathlib import Path

import pytest

from batchline.app.startup import folder_lock
from batchline.store.sqlite import database
from tests.support.command_line import Shell


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Return the command line of a version that has one more migration than the folder."""
    shell = Shell(tmp_path / "data")
    shell.json("keys", "create")
    scripts = [*database._migrations(), "CREATE TABLE later (id INTEGER);"]
    monkeypatch.setattr(database, "_migrations", lambda: scripts)
    return shell


@pytest.mark.rule("F1", "A command on a data folder of an older version says what to do.")
@pytest.mark.parametrize("command", ["keys list", "keys create", "orgs list", "projects list", "usage", "backup FILE"])
def test_a_folder_of_an_older_version_is_refused_with_the_remedy(shell: Shell, tmp_path: Path, command: str) -> None:
    code, text = shell.refusal(*command.replace("FILE", str(tmp_path / "file")).split())
    assert code == 1
    assert "made by an older version of batchline" in text
    assert "run: batchline migrate" in text


@pytest.mark.rule("F1", "migrate upgrades a data folder that no service uses.")
def test_migrate_upgrades_a_folder_that_nobody_uses(shell: Shell) -> None:
    with folder_lock(shell.folder):
        assert "Stop that one" in shell.refusal("migrate")[1]
    assert "Up to date" in shell.text("migrate")
    assert len(shell.json("keys", "list")) == 1


def test_a_folder_has_no_migration_of_another_process_to_wait_for(shell: Shell) -> None:
    assert "--wait is for PostgreSQL" in shell.refusal("migrate", "--wait")[1]
