"""`batchline doctor`: what is wrong with this machine."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from batchline.cli import main
from tests.support.command_line import Shell
from tests.support.scripted_server import answering, reply


def _findings(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(main, ["doctor", "--json", *arguments])
    return result.exit_code, {each["part"]: each for each in json.loads(result.stdout)}


def test_a_healthy_machine_is_0_and_nothing_is_created(tmp_path: Path) -> None:
    models = b'{"object": "list", "data": [{"id": "small"}, {"id": "large"}]}'
    with answering(reply(200, models)) as server:
        code, found = _findings(
            "--data-dir", str(tmp_path / "data"), "--port", "0", "--upstream-url", f"{server.url}/v1"
        )
    assert code == 0, found
    assert {each["verdict"] for each in found.values()} == {"ok"}
    assert found["upstream"]["text"] == "default: answers with 2 models: small, large"
    assert server.asked[0].head.startswith("GET /v1/models ")
    assert not (tmp_path / "data").exists()


def test_each_fault_has_a_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, found = _findings(
            "--data-dir", str(tmp_path / "data"), "--port", port, "--upstream-url", "http://127.0.0.1:1/v1"
        )
    assert code == 1
    assert found["port"]["verdict"] == "failure"
    assert "--port" in found["port"]["remedy"]
    assert found["upstream"]["verdict"] == "failure"
    assert "BATCHLINE_UPSTREAM_URL" in found["upstream"]["remedy"]


def test_wrong_credentials_and_the_toy_are_told_of(tmp_path: Path) -> None:
    with answering(reply(401)) as server:
        _, found = _findings("--data-dir", str(tmp_path), "--port", "0", "--upstream-url", f"{server.url}/v1")
    assert found["upstream"]["text"] == "default: does not accept the credentials (status 401)"
    _, found = _findings("--data-dir", str(tmp_path), "--port", "0")
    assert found["upstream"]["verdict"] == "warning"
    assert "a toy" in found["upstream"]["text"]


@pytest.mark.parametrize(
    ("base", "path"), [("", "/v1/models"), ("/", "/v1/models"), ("/openai/v1/", "/openai/v1/models")]
)
def test_an_upstream_is_asked_where_the_service_asks_it(base: str, path: str, tmp_path: Path) -> None:
    """D1: its URL may lack the /v1."""
    models = b'{"object": "list", "data": [{"id": "small"}]}'
    with answering(reply(200, models)) as server:
        _, found = _findings("--data-dir", str(tmp_path), "--port", "0", "--upstream-url", f"{server.url}{base}")
    assert server.asked[0].head.startswith(f"GET {path} ")
    assert found["upstream"]["verdict"] == "ok"


def test_a_url_that_cannot_be_used_is_told_of(tmp_path: Path) -> None:
    wrong = "http://127.0.0.1:port/v1"
    code, found = _findings("--data-dir", str(tmp_path), "--port", "0", "--upstream-url", wrong)
    assert code == 1
    assert found["upstream"]["verdict"] == "failure"
    assert found["upstream"]["text"].startswith("BATCHLINE_UPSTREAM_URL cannot be used: ")


def test_a_damaged_database_is_told_of(tmp_path: Path) -> None:
    Shell(tmp_path / "data").text("keys", "create")
    (tmp_path / "data" / "batchline.sqlite").write_bytes(b"no database" * 1000)
    code, found = _findings("--data-dir", str(tmp_path / "data"), "--port", "0")
    assert code == 1
    assert found["database"]["verdict"] == "failure"


def test_the_text_is_a_line_for_each_part(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["doctor", "--data-dir", str(tmp_path), "--port", "0"])
    assert [line.split()[1] for line in result.stdout.splitlines() if not line.startswith(" ")] == [
        *("folder", "disk", "limits", "service", "port", "clock", "database", "upstream"),
    ]
    assert "\x1b" not in result.stdout
