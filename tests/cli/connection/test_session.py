"""The connection of a client command."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from batchline.cli import main
from batchline.cli.loading import BASE_URL_VARIABLES
from tests.support.command_line import Shell
from tests.support.scripted_server import answering, reply

_NOWHERE = dict.fromkeys(BASE_URL_VARIABLES)


def test_a_command_that_waits_for_lines_needs_a_service(tmp_path: Path) -> None:
    """Nothing would change without one, and none is started behind the user's back."""
    Shell(tmp_path / "data").text("keys", "create")
    arguments = ["results", "batch_1", "--follow", "--data-dir", str(tmp_path / "data")]
    result = CliRunner(env=_NOWHERE).invoke(main, arguments)
    assert result.exit_code == 1
    assert (
        f"No service runs on {tmp_path / 'data'}, so no line would run. Start one with: batchline serve"
        in result.stderr
    )


@pytest.mark.parametrize(
    ("answer", "code", "text"),
    [
        (reply(401, b"{}"), 4, "Set BATCHLINE_API_KEY to a key that"),
        (reply(404, b"{}"), 1, "says: the server answered 404 Word."),
        (reply(200, b"<html>"), 1, "the answer is not that of a batchline server; is the URL right?"),
    ],
)
def test_each_failure_has_its_code_and_says_what_to_do(answer: bytes, code: int, text: str) -> None:
    with answering(answer) as server:
        runner = CliRunner(env={"BATCHLINE_BASE_URL": server.url, "BATCHLINE_API_KEY": "k"})
        result = runner.invoke(main, ["batches", "show", "batch_1"])
    assert result.exit_code == code
    assert text in result.stderr
    assert result.stdout == ""


def test_flags_of_a_folder_do_not_go_with_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the variable that named the server."""
    environment = _NOWHERE | {"OPENAI_BASE_URL": "http://127.0.0.1:1/v1", "OPENAI_API_KEY": "k"}
    result = CliRunner(env=environment).invoke(main, ["files", "list", "--data-dir", "x"])
    assert result.exit_code == 2
    assert "but OPENAI_BASE_URL names a server" in result.stderr


def test_ctrl_c_ends_a_command_in_order() -> None:
    with answering(lambda _: _interrupt(child)) as server:
        environment = {"BATCHLINE_BASE_URL": server.url, "BATCHLINE_API_KEY": "k", "PATH": "/usr/bin"}
        child = subprocess.Popen(
            [sys.executable, "-m", "batchline", "batches", "list"], env=environment, stderr=subprocess.PIPE, text=True
        )
        _, told = child.communicate(timeout=300)
    assert child.returncode == 130
    assert "Traceback" not in told


def _interrupt(child: "subprocess.Popen[str]") -> bytes:
    """Interrupt the command while it waits for its answer."""
    child.send_signal(signal.SIGINT)
    child.wait(300)
    return b""
