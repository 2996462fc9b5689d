"""The help of commands, and what a person is told who mistypes one."""

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from batchline.cli import main
from batchline.cli.help import SettingOption


def _commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


_ALL = dict(_commands(main))


def _help(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments, terminal_width=80)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("path", _ALL, ids=" ".join)
def test_help_of_each_command_is_short_and_its_options_say_what_to_type(path: tuple[str, ...]) -> None:
    """Settings of the service are listed by --help-all alone."""
    text = _help(*path, "--help")
    assert len(text.splitlines()) <= 60
    for option in _ALL[path].params:
        if isinstance(option, SettingOption):
            assert f"  {option.opts[0]} " not in text
            assert f"  {option.opts[0]} " in _help(*path, "--help-all")
    for vague in (" TEXT", " INTEGER", " FLOAT", " RANGE"):
        assert vague not in text


@pytest.mark.parametrize(
    ("flag", "metavar"),
    [
        ("--metering", "[on|off]"),
        ("--config", "FILE"),
        ("--data-dir", "FOLDER"),
        ("--upstream-url", "URL"),
        ("--max-attempts", "N"),
        ("--free-credits", "N"),
        ("--lease-seconds", "SECONDS"),
        ("--max-file-bytes", "BYTES"),
        ("--cors-origins", "LIST"),
        ("--media-hosts", "LIST"),
        ("--admin-token", "SECRET"),
    ],
)
def test_a_metavar_says_what_to_type(flag: str, metavar: str) -> None:
    assert f"  {flag} {metavar}" in _help("serve", "--help-all")


@pytest.mark.parametrize(("typed", "meant"), [("serv", "serve"), ("rnu", "run"), ("key", "keys")])
def test_a_mistyped_command_gets_a_suggestion(typed: str, meant: str) -> None:
    result = CliRunner().invoke(main, [typed])
    assert result.exit_code == 2
    assert f"'{meant}'" in result.stderr


def test_a_mistyped_subcommand_gets_a_suggestion() -> None:
    result = CliRunner().invoke(main, ["keys", "lst"])
    assert result.exit_code == 2
    assert "'list'" in result.stderr
