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


@pytest.mark.parametrize(
    ("content", "place", "reason"),
    [
        (b"port = \n", ", line 1, column 8", ": a value is missing, or is a text without quotes"),
        (b"upstream_api_key = hush\n", ", line 1, column 20", ": a value is missing, or is a text without quotes"),
        (b"port = 1\nport = 2\n", ", line 2, column 9", ": a key or table is given twice"),
        (b"[models.hush]\n[models.hush]\n", ", line 2, column 13", ": a table is given twice"),
        (b'host = "\x01"\n', ", line 1, column 9", ""),
        (b'host = "\xff"\n', "", ": it is not in UTF-8"),
    ],
)
def test_a_file_that_is_no_toml_is_named_with_the_place_and_the_reason(
    tmp_path: Path, content: bytes, place: str, reason: str
) -> None:
    path = tmp_path / "b.toml"
    path.write_bytes(content)
    result = CliRunner().invoke(main, ["config", "check", str(path)])
    assert result.exit_code == 2
    assert f"Error: {path}{place}: the file cannot be read as TOML{reason}\n" in result.stderr
    assert "hush" not in result.stderr
