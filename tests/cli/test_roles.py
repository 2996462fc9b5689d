"""The commands that run the service: serve, api and worker."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from batchline import app
from batchline.cli import main
from batchline.cli.roles import Progress, run_role

# A role runs in the process of the tests here.
pytestmark = pytest.mark.usefixtures("restored_process")


def test_a_service_that_cannot_start_says_why_and_ends_with_1(tmp_path: Path) -> None:
    """No traceback for a person who mistyped the upstream."""
    wrong = ["--upstream-url", "http://127.0.0.1:port/v1"]
    result = subprocess.run(
        [sys.executable, "-m", "batchline", "serve", "--data-dir", str(tmp_path), "--port", "0", *wrong],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 1
    assert result.stderr.startswith("Error: BATCHLINE_UPSTREAM_URL cannot be used: ")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("role", ["api", "worker"])
def test_a_node_without_postgresql_is_refused_with_what_to_set(role: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, [role, "--data-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "BATCHLINE_DATABASE_URL" in result.stderr


def test_a_failed_start_is_an_error_of_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def fail(*_: object) -> None:
        raise app.StartupError("the port is taken")

    monkeypatch.setattr(app, "serve", fail)
    with pytest.raises(click.ClickException, match="the port is taken"):
        run_role("serve", {"data_dir": str(tmp_path)})


def test_a_download_is_shown_on_a_terminal_and_its_line_ends_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def download(_: object, progress: Progress) -> None:
        for done in (400_000, 731_778):
            progress("the classifier's vocabulary", done, 731_778)
        click.echo("the service starts", err=True)

    monkeypatch.setattr(app, "serve", download)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    run_role("serve", {"data_dir": str(tmp_path)})
    shown = [
        f"\rDownloading the classifier's vocabulary (only once): {size} of 732 KB" for size in ("400 KB", "732 KB")
    ]
    assert capsys.readouterr().err == f"{''.join(shown)}\nthe service starts\n"
