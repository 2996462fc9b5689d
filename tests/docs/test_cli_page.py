"""docs/cli.md says what the commands say."""

import re

from batchline.cli.roles import FOLDER_TAKEN
from tests.docs.cli_page import PAGE, page


def test_the_page_is_that_of_the_commands() -> None:
    assert PAGE.read_text() == page(), "run: make cli-page"


def test_every_exit_code_that_a_command_names_is_explained() -> None:
    text = PAGE.read_text()
    table = set(re.findall(r"^\| (\d+)", text, re.MULTILINE))
    named = {
        code for line in re.findall(r"^Exit codes: (.*)$", text, re.MULTILINE) for code in re.findall(r"\b\d+\b", line)
    }
    assert named | {str(FOLDER_TAKEN)} <= table
