"""The link that ``serve`` prints on a terminal."""

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.console import shown, visitor
from tests.support.service import PATIENCE

_LINK = re.compile(r"console\s+(http://\S+\?once=[0-9a-f]{64})")


_BATCHLINE = [sys.executable, "-m", "batchline"]


@pytest.fixture
def link(tmp_path: Path) -> Iterator[str]:
    with serving_on_a_terminal(tmp_path / "data") as printed:
        yield printed


@contextmanager
def serving_on_a_terminal(data: Path) -> Iterator[str]:
    """Start the service on a terminal, and yield the link that it prints."""
    terminal, end = pty.openpty()
    arguments = ["--port", "0", "--data-dir", str(data), "--upstream-url", "http://127.0.0.1:1/v1"]
    process = subprocess.Popen([*_BATCHLINE, "serve", *arguments], stdin=end, stdout=subprocess.DEVNULL, stderr=end)
    os.close(end)
    printed = ""
    try:
        while not (found := _LINK.search(printed)):
            printed += os.read(terminal, 4096).decode()
        yield found[1]
    finally:
        process.terminate()
        process.wait(PATIENCE)
        os.close(terminal)


@pytest.mark.rule("F7", "On a terminal, serve prints a link that signs in once.")
def test_the_printed_link_signs_in_once_without_a_key(link: str) -> None:
    parts = urlsplit(link)
    with visitor(parts.port or 0) as person, visitor(parts.port or 0) as second:
        answer = person.get(f"{parts.path}?{parts.query}")
        assert answer.headers["location"] == "/console/batches"
        assert "Your first batch" in person.page("/console/batches")
        keys = shown(person.page("/console/keys"))
        assert "console on this machine" in keys
        assert "no secret" in keys
        again = second.get(f"{parts.path}?{parts.query}")
        assert "was used already" in again.text
        assert second.get("/console/batches").status_code == 303


@pytest.mark.rule("F7", "The link opens no key that somebody named as the service names its own.")
def test_the_printed_link_never_signs_in_with_a_key_that_has_a_secret(tmp_path: Path) -> None:
    data = tmp_path / "data"
    for project, name in (("oldest", "first"), ("other", "console on this machine")):
        options = ["--data-dir", str(data), "--project", project, "--name", name]
        subprocess.run([*_BATCHLINE, "keys", "create", *options], check=True, capture_output=True)
    with serving_on_a_terminal(data) as link, visitor(urlsplit(link).port or 0) as person:
        person.get(f"{urlsplit(link).path}?{urlsplit(link).query}")
        assert "Keys of the project oldest" in shown(person.page("/console/keys"))
