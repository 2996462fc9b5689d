"""`batchline completion`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from batchline.cli import main


@pytest.mark.parametrize(("shell", "word"), [("bash", "complete -o"), ("zsh", "compdef"), ("fish", "complete --no")])
def test_the_script_of_each_shell_is_printed(shell: str, word: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0, result.output
    assert word in result.stdout
    assert "_BATCHLINE_COMPLETE" in result.stdout


def test_the_help_has_the_command_of_each_shell_on_a_line_of_its_own() -> None:
    result = CliRunner().invoke(main, ["completion", "--help"])
    commands = [line.split(maxsplit=1) for line in result.stdout.splitlines() if ">" in line]
    assert [shell for shell, _ in commands] == ["bash", "zsh", "fish"]
    assert commands[0][1] == """echo 'eval "$(batchline completion bash)"' >> ~/.bashrc"""


def test_the_program_answers_the_script() -> None:
    """It lists the commands that begin with what was typed."""
    environment = os.environ | {"_BATCHLINE_COMPLETE": "bash_complete", "COMP_WORDS": "batchline re", "COMP_CWORD": "1"}
    program = Path(sys.executable).with_name("batchline")
    ran = subprocess.run([program], env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert ran.stdout.split() == ["plain,results", "plain,rerun", "plain,restore"]


def test_an_unknown_shell_is_2() -> None:
    assert CliRunner().invoke(main, ["completion", "csh"]).exit_code == 2
