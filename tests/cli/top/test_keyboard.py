"""Keys that end a screen."""

import os
import pty
import subprocess
import sys
from pathlib import Path

from tests.support.command_line import Shell
from tests.support.service import PATIENCE


def test_the_key_q_ends_the_screen_and_leaves_the_terminal_as_it_was(tmp_path: Path) -> None:
    Shell(tmp_path / "data").text("keys", "create")
    terminal, end = pty.openpty()
    arguments = ["top", "--data-dir", str(tmp_path / "data")]
    environment = os.environ | {"TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "batchline", *arguments], stdin=end, stdout=end, stderr=end, env=environment
    )
    shown = b""
    try:
        while b"No batch is open." not in shown:
            shown += os.read(terminal, 4096)
        os.write(terminal, b"xq")
        while b"\x1b[?1049l" not in shown:  # The terminal shows again what it did before.
            shown += os.read(terminal, 4096)
        assert process.wait(PATIENCE) == 0
        os.write(terminal, b"seen\n")
        assert b"seen" in os.read(terminal, 4096), "it echoes what is typed, as before"
    finally:
        process.kill()
        os.close(end)
        os.close(terminal)
