"""``batchline mock`` as a real process."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, IncompleteRead
from typing import Any
from urllib.request import urlopen

import pytest

COMMAND = [sys.executable, "-c", "from batchline.cli.mock import mock; mock()"]
HELLO = (
    b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 60\r\n\r\n"
    b'{"model":"m","messages":[{"role":"user","content":"hello"}]}'
)
ANNOUNCED = re.compile(r"batchline mock listens on http://127\.0\.0\.1:(\d+)/v1 \(scripted answers, not a model\)\n")


@contextmanager
def running(*options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen([*COMMAND, "--port", "0", *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            announced = ANNOUNCED.fullmatch(process.stdout.readline())
            assert announced is not None
            yield process, int(announced[1])
        finally:
            process.kill()


def ask(port: int, prompt: str) -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", port)
    try:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}]})
        connection.request("POST", "/v1/chat/completions", body)
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


def stats(port: int) -> Any:
    with urlopen(f"http://127.0.0.1:{port}/stats") as response:
        return json.load(response)


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_it_is_told_to_stop(name: signal.Signals) -> None:
    """One line says where, at once; an interrupt is no failure, also with a client in the middle of a request."""
    with running() as (process, port):
        assert b"scripted answer to: hello" in ask(port, "hello")[2]
        with socket.create_connection(("127.0.0.1", port)) as unfinished:
            unfinished.sendall(HELLO[:-1])
            process.send_signal(name)
            assert process.wait() == 0
            assert process.communicate()[0] == ""


def test_a_crash_really_ends_the_process() -> None:
    """D5: an upstream that dies under a poisonous line."""
    with running() as (process, port):
        with pytest.raises(ConnectionResetError):
            ask(port, "[[crash]]")
        assert process.wait() == 70


@pytest.mark.parametrize(
    ("options", "statuses"),
    [
        (["--status", "503=100", "--retry-after", "7"], {503}),
        (["--status", "500=50", "--status", "429=50"], {500, 429}),
        (["--html", "100"], {200}),
    ],
)
def test_shares_are_taken_from_the_options(options: list[str], statuses: set[int]) -> None:
    with running(*options) as (_, port):
        answers = [ask(port, f"line {n}") for n in range(20)]
    assert {status for status, _, _ in answers} == statuses
    if "--retry-after" in options:
        assert {headers["Retry-After"] for _, headers, _ in answers} == {"7"}
    if "--html" in options:
        assert all(body.startswith(b"<!DOCTYPE html>") for _, _, body in answers)


@pytest.mark.parametrize(("option", "error"), [("--cut", IncompleteRead), ("--drop", ConnectionResetError)])
def test_breaking_off_is_an_option(option: str, error: type[Exception]) -> None:
    with running(option, "100") as (_, port), pytest.raises(error):
        ask(port, "hello")


@pytest.mark.parametrize("options", [["--hang", "100"], ["--delay", "3600"]])
def test_waiting_is_an_option(options: list[str]) -> None:
    """What came is still in flight; without the option it would be answered before it is counted."""
    with running(*options) as (_, port), socket.create_connection(("127.0.0.1", port)) as waiting:
        waiting.sendall(HELLO)
        while (seen := stats(port))["requests"] == 0:
            """The request is on its way."""
        assert seen["in_flight"] == 1


def test_a_seed_repeats_a_run() -> None:
    """The same seed meets the same lines, in another process too."""

    def statuses(seed: str) -> list[int]:
        with running("--status", "500=50", "--seed", seed) as (_, port):
            return [ask(port, f"line {n}")[0] for n in range(40)]

    assert statuses("1") == statuses("1") != statuses("2")


@pytest.mark.parametrize(
    "options",
    [
        ["--status", "503"],
        ["--status", "99=1"],
        ["--status", "503=x"],
        ["--cut", "101"],
        ["--cut", "60", "--drop", "41"],
        ["--delay", "-1"],
        ["--port", "70000"],
    ],
)
def test_options_that_cannot_be_are_a_usage_error(options: list[str]) -> None:
    """F4: exit code 2 is for usage."""
    done = subprocess.run([*COMMAND, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("Usage: ")


def test_a_port_that_is_taken_is_a_plain_failure() -> None:
    """F4: exit code 1 and one line that says why, no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run([*COMMAND, "--port", port], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: cannot listen on 127.0.0.1:{port}: ")
    assert "Traceback" not in done.stderr
