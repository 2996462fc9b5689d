"""Tables and bars for people."""

import io
import sys

import pytest

from batchline.cli.views import bar_text, show
from batchline.client.models import Counts


@pytest.mark.parametrize(("encoding", "bar"), [("utf-8", "██░░  50 %\n"), ("iso-8859-1", "##..  50 %\n")])
def test_a_bar_is_made_of_characters_that_stdout_has(monkeypatch: pytest.MonkeyPatch, encoding: str, bar: str) -> None:
    """A character that the terminal's encoding lacks would end the command."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding))
    show(bar_text(Counts(total=4, completed=2), width=4))
    sys.stdout.flush()
    assert written.getvalue().decode(encoding) == bar
