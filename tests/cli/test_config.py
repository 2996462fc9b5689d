"""`batchline config check`: the settings without starting a service."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from batchline.cli import main


def test_a_valid_file_says_who_would_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "b.toml"
    path.write_text('upstream_url = "http://127.0.0.1:9/v1"\n[models.small]\n')
    monkeypatch.setenv("BATCHLINE_MAX_ATTEMPTS", "3")
    result = CliRunner().invoke(main, ["config", "check", str(path)])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        f"{path}: valid; 3 settings given",
        "  BATCHLINE_MAX_ATTEMPTS",
        f"  models in {path}",
        f"  upstream_url in {path}",
        "Answers come from: default http://127.0.0.1:9/v1 (small)",
    ]
    found = json.loads(CliRunner().invoke(main, ["config", "check", "--config", str(path), "--json"]).stdout)
    assert found["valid"] is True
    assert found["answers"] == ["default http://127.0.0.1:9/v1 (small)"]


def test_every_fault_is_named_and_nothing_is_created(tmp_path: Path) -> None:
    path = tmp_path / "b.toml"
    path.write_text("port = 99999\nmax_attempts = 0\n")
    result = CliRunner().invoke(main, ["config", "check", str(path)])
    assert result.exit_code == 2
    assert f"port in {path}: the value must be at most 65535" in result.stderr
    assert f"max_attempts in {path}: the value must be at least 1" in result.stderr
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_no_toml_names_the_place(tmp_path: Path) -> None:
    path = tmp_path / "b.toml"
    path.write_text("port = \n")
    result = CliRunner().invoke(main, ["config", "check", str(path)])
    assert result.exit_code == 2
    assert "the file cannot be read as TOML; look at line 1, column 8" in result.stderr
