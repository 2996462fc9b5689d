"""A whole service as users run it: `batchline mock` and `batchline serve` as processes, and a key."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

_BATCHLINE = (sys.executable, "-m", "batchline")
_PATIENCE_SECONDS = 60
"""A guard against hanging for ever, not a measure of anything."""


class Live(Struct, frozen=True, kw_only=True):
    base_url: str
    api_key: str
    project_id: str
    data_dir: Path

    def keys(self, *arguments: str) -> str:
        """`batchline keys …` beside the running service."""
        return _keys(self.data_dir, *arguments)

    def status_of_list(self, api_key: str) -> int:
        """What the service answers to a list of files with this key."""
        return _get(f"{self.base_url}/files", {"x-api-key": api_key, "x-project-id": self.project_id})


@contextmanager
def live_service(folder: Path) -> Iterator[Live]:
    data_dir = folder / "data"
    with _mock() as upstream, _serve(data_dir, upstream) as base_url:
        made = json.loads(_keys(data_dir, "create", "--json"))
        yield Live(base_url=base_url, api_key=made["api_key"], project_id=made["project_id"], data_dir=data_dir)


@contextmanager
def _mock() -> Iterator[str]:
    with _process("mock", "--port", "0", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        told = re.search(r"http://\S+", process.stdout.readline())
        assert told is not None
        yield told[0]


@contextmanager
def _serve(data_dir: Path, upstream: str) -> Iterator[str]:
    port = _free_port()
    flags = ("--port", str(port), "--data-dir", str(data_dir), "--upstream-url", upstream)
    with _process("serve", *flags) as process:
        _wait_until_ready(process, f"http://127.0.0.1:{port}/readyz")
        yield f"http://127.0.0.1:{port}/v1"


@contextmanager
def _process(*arguments: str, stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([*_BATCHLINE, *arguments], text=True, stdout=stdout) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_ready(process: subprocess.Popen[str], url: str) -> None:
    give_up = time.monotonic() + _PATIENCE_SECONDS
    while _get(url, {}) != 200:
        assert process.poll() is None, "the service ended instead of starting"
        assert time.monotonic() < give_up, "the service does not become ready"
        time.sleep(0.02)


def _get(url: str, headers: dict[str, str]) -> int:
    """The status, or 0 where nothing listens."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_PATIENCE_SECONDS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code
    except urllib.error.URLError:
        return 0


def _keys(data_dir: Path, *arguments: str) -> str:
    command = [*_BATCHLINE, "keys", *arguments, "--data-dir", str(data_dir)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=_PATIENCE_SECONDS).stdout


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
