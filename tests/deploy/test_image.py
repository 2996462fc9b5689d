"""The Dockerfile: from pinned parts, as a user without rights, and with a health check that tells the truth.

That docker builds it is not shown here.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from tests.support.deploy_files import ENV, IMAGE, ROOT, arguments, last, settings_of


def test_the_image_stands_on_one_named_version_of_the_python_that_the_locks_are_for() -> None:
    assert {base.split()[0] for base in arguments("FROM")} == {"${PYTHON_IMAGE}"}
    [python] = [given.removeprefix("PYTHON_IMAGE=") for given in arguments("ARG")]
    [locked] = re.findall(r"--python-version (\S+)", (ROOT / "Makefile").read_text())
    assert re.fullmatch(rf"python:{re.escape(locked)}\.\d+-slim-\w+", python)


def test_the_script_for_machines_without_docker_builds_this_version_of_the_same_dockerfile() -> None:
    script = ROOT / "deploy" / "image" / "build.sh"
    assert subprocess.run(["sh", "-n", script], check=False).returncode == 0
    [command] = re.findall(r"^VERSION=\$\((.+)\)$", script.read_text(), re.MULTILINE)
    version = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    assert f"batchline:{version}" == IMAGE
    [named] = re.findall(r'--build-arg "(\w+)=', script.read_text())
    assert named in {given.partition("=")[0] for given in arguments("ARG")}
    assert os.access(script, os.X_OK)


def test_nothing_is_installed_but_what_a_lock_pins_by_hash() -> None:
    installs = re.findall(r"pip install ([^&|;]+)", " ; ".join(arguments("RUN")))
    assert {"requirements.lock", "requirements-build.lock"} <= set(" ".join(installs).split())
    for install in installs:
        assert "--require-hashes" in install or {"--no-index", "--no-deps"} <= set(install.split()), install
    assert "://" not in (ROOT / "Dockerfile").read_text()


def test_everything_that_is_copied_is_there_and_let_through() -> None:
    let_through = set(re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE))
    copied = {path for copy in arguments("COPY") if "--from=" not in copy for path in copy.split()[:-1]}
    assert copied == let_through
    assert [path for path in copied if not (ROOT / path).exists()] == []


def test_the_image_runs_as_a_user_of_its_own_that_may_write_to_its_volume() -> None:
    user, group = last("USER").split(":")
    assert int(user) > 0
    prepared = last("RUN")
    assert f"useradd --uid {user} --gid {group}" in prepared
    assert f"--owner={user} --group={group} --mode=0700 {last('VOLUME')}" in prepared
    assert ENV["BATCHLINE_DATA_DIR"] == last("VOLUME")
    assert ENV["XDG_CACHE_HOME"].startswith(last("VOLUME"))


def test_the_image_serves_on_the_port_it_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """F1: without arguments it is everything in one."""
    settings = settings_of(monkeypatch, ENV)
    assert (settings.host, str(settings.port)) == ("0.0.0.0", last("EXPOSE"))
    assert capsys.readouterr().err == ""
    assert json.loads(last("ENTRYPOINT")) == ["batchline"]
    assert json.loads(last("CMD")) == ["serve"]


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1)])
def test_the_health_check_tells_what_healthz_answers(status: int, expected: int) -> None:
    """F5."""
    with _answering("/healthz", status) as port:
        assert _health_check(port) == expected


def test_the_health_check_fails_where_nobody_listens() -> None:
    with _answering("/healthz", 200) as port:
        pass
    assert _health_check(port) == 1


def _health_check(port: int) -> int:
    program, *arguments = json.loads(last("HEALTHCHECK").split("CMD", 1)[1])
    assert program == "python"
    environment = os.environ | {"BATCHLINE_PORT": str(port), "http_proxy": "http://127.0.0.1:9"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=False).returncode


@contextmanager
def _answering(path: str, status: int) -> Iterator[int]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == path else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Not on the tests' own output."""

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
