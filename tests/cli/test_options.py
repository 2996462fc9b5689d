"""Settings as flags of the command line, and what a person is told when one is wrong."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from batchline import __version__
from batchline.cli import main
from batchline.cli.loading import load_settings
from batchline.cli.options import FLAGS, TABLES, default_text, flag, settings_options, variable
from batchline.settings import Settings


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(variable(name), raising=False)


@click.command()
@settings_options()
def show(**flags: str | None) -> None:
    """Every flag, without a service behind them."""
    click.echo(repr(load_settings(**flags)))


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(show, arguments)


def _refused(*arguments: str) -> str:
    result = _run(*arguments)
    assert result.exit_code == 2, result.output
    return result.stderr


@pytest.mark.parametrize("name", FLAGS)
def test_every_setting_is_a_flag_with_its_variable_and_default_in_the_help(name: str) -> None:
    """F2: no setting can be reached in only one way."""
    option = next(option for option in show.params if option.name == name)
    assert isinstance(option, click.Option)
    assert option.opts == [flag(name)]
    description = Settings.model_fields[name].description
    assert description
    assert option.help == f"{description} [{variable(name)}; default {default_text(Settings.model_fields[name])}]"


def test_only_the_tables_of_the_file_are_no_flags() -> None:
    """F2: a table has no form that a flag could take, and everything else has one."""
    assert set(TABLES) == {"upstreams", "models", "projects", "organizations"}
    assert set(Settings.model_fields) == {*FLAGS, *TABLES}
    assert {option.name for option in show.params} == set(FLAGS)


@pytest.mark.parametrize(("text", "meant"), [("on", True), ("off", False), ("true", True), ("0", False)])
def test_a_switch_is_on_or_off(text: str, meant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: BATCHLINE_METERING and BATCHLINE_BEARER (A13) take the words of the contract."""
    assert load_settings(metering=text).metering is meant
    monkeypatch.setenv("BATCHLINE_BEARER", text)
    assert load_settings().bearer is meant


def test_defaults_are_written_as_a_person_would_write_them() -> None:
    assert [default_text(Settings.model_fields[name]) for name in ("metering", "free_credits", "config")] == [
        "off",
        "5",
        "none",
    ]
    model, upstream = TABLES["models"].model_fields, TABLES["upstreams"].model_fields
    assert [default_text(model[name]) for name in ("kind", "error_on_max_token", "paths", "projects")] == [
        "chat",
        "on",
        "none",
        "none",
    ]
    assert default_text(upstream["url"]) == "required"


def test_a_flag_reaches_the_settings() -> None:
    result = _run("--port", "9001", "--batch-endpoints", "/v1/a,/v1/b", "--upstream-url", "http://127.0.0.1:1/v1")
    assert result.exit_code == 0
    assert "port=9001" in result.output
    assert "('/v1/a', '/v1/b')" in result.output


def test_a_flag_beats_the_environment_and_absent_flags_leave_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """F2 through the command line."""
    monkeypatch.setenv("BATCHLINE_PORT", "9002")
    monkeypatch.setenv("BATCHLINE_HOST", "0.0.0.0")
    settings = load_settings(port="9001", host=None)
    assert (settings.port, settings.host) == (9001, "0.0.0.0")


def test_a_wrong_flag_is_named_with_what_was_expected() -> None:
    told = _refused("--port", "99999")
    assert "--port: the value must be at most 65535" in told
    assert "Expected: Port to listen on" in told


def test_a_wrong_variable_is_named_as_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag of the same name was never typed, so pointing at it would mislead."""
    monkeypatch.setenv("BATCHLINE_MAX_ATTEMPTS", "many")
    assert "Error: BATCHLINE_MAX_ATTEMPTS: " in _refused()


def test_a_variable_that_is_no_setting_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: a typo, or a setting of another version, would otherwise do nothing in silence. Its value is not repeated."""
    monkeypatch.setenv("BATCHLINE_PROT", "9000-is-secret")
    result = _run()
    assert result.exit_code == 0
    assert (
        "BATCHLINE_PROT is not a setting of this version and is ignored; did you mean BATCHLINE_PORT?" in result.stderr
    )
    assert "9000-is-secret" not in result.output
    monkeypatch.delenv("BATCHLINE_PROT")
    assert "Warning" not in _run().stderr


def test_a_wrong_line_of_the_file_is_named_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "batchline.toml"
    path.write_text("port = 99999\n")
    assert f"Error: port in {path}: " in _refused("--config", str(path))
    monkeypatch.setenv("BATCHLINE_CONFIG", str(path))
    assert f"Error: port in {path}: " in _refused()


def test_an_unknown_key_of_the_file_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    path = tmp_path / "batchline.toml"
    path.write_text("prot = 9000\n")
    assert f"prot in {path}: there is no such setting; did you mean port?" in _refused("--config", str(path))


def test_every_fault_is_told_at_once() -> None:
    told = _refused("--port", "x", "--max-attempts", "0")
    assert "--port: " in told
    assert "--max-attempts: " in told


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "there is no file"), (b"port = ", "cannot be read as TOML"), (b'host = "\xff"', "cannot be read as TOML")],
)
def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    """A service that runs on defaults because its file was not found is worse than one that does not start."""
    path = tmp_path / "batchline.toml"
    if content is not None:
        path.write_bytes(content)
    told = _refused("--config", str(path))
    assert str(path) in told
    assert reason in told


@pytest.mark.parametrize(
    ("name", "value"), [("upstream_url", "ftp://user:hush@host"), ("port", "hush"), ("max_line_bytes", "hush")]
)
def test_a_refused_value_is_never_repeated(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a secret that was put in the wrong place."""
    assert "hush" not in _refused(flag(name), value)
    monkeypatch.setenv(variable(name), value)
    assert "hush" not in _refused()


def test_the_group_lists_every_command() -> None:
    told = CliRunner().invoke(main, ["--help"]).output
    for command in ("keys", "mock", "orgs", "projects", "run", "serve", "usage"):
        assert f"\n  {command} " in told


@pytest.mark.parametrize(
    "command",
    [
        ["serve"],
        ["mock"],
        ["usage"],
        ["projects", "list"],
        *(["keys", verb] for verb in ("create", "list", "revoke", "rotate")),
        *(["orgs", verb] for verb in ("list", "set-balance")),
    ],
    ids=" ".join,
)
def test_every_command_has_help(command: list[str]) -> None:
    result = CliRunner().invoke(main, [*command, "--help"])
    assert result.exit_code == 0
    assert "Usage: batchline " + " ".join(command) in result.output


def test_an_unknown_command_is_a_usage_error() -> None:
    assert CliRunner().invoke(main, ["nope"]).exit_code == 2


def test_python_dash_m_is_the_same_command(tmp_path: Path) -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "batchline", "--version"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert answer.stdout == f"batchline, version {__version__}\n"


@pytest.mark.parametrize("command", [[], ["run"], ["serve"], ["keys"], ["usage"]], ids=" ".join)
def test_help_loads_neither_the_service_nor_its_client(command: list[str]) -> None:
    """`--help` must be fast, so it imports nothing that only a running service or a request needs."""
    program = f"""
import sys
from batchline.cli import main
main({[*command, "--help"]!r}, standalone_mode=False)
sys.exit(",".join({{"uvicorn", "starlette", "httpx", "batchline.app"}} & set(sys.modules)) or None)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (result.returncode, result.stderr.strip()) == (0, "")


@pytest.mark.parametrize(
    ("command", "code"), [("keys list", 1), ("doctor", 1), ("top", 1), ("batches list", 1), ("usage", 1), ("fsck", 2)]
)
def test_a_folder_that_cannot_be_looked_into_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, code: int
) -> None:
    """It may be that of the service, which only its own user may enter. A name that is too long fails alike."""
    for name in ("BATCHLINE_BASE_URL", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    result = CliRunner().invoke(main, [*command.split(), "--data-dir", str(tmp_path / ("x" * 300))])
    assert isinstance(result.exception, SystemExit), "no traceback"
    assert result.exit_code == code
    assert "File name too long" in result.stderr
