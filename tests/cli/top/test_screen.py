"""`batchline top`: what runs over all projects."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from click.testing import CliRunner

from batchline.cli import main
from tests.support.certificates import context_of, self_signed
from tests.support.command_line import Shell
from tests.support.scripted_server import answering, reply
from tests.support.service import Service, chat_lines, submit


def test_open_batches_of_all_projects_and_the_upstreams_are_shown(service: Service) -> None:
    accounts = [service.new_account(f"top-{number}") for number in range(2)]
    made = [submit(service.client(account), chat_lines(["[[delay=20]]"])) for account in accounts]
    arguments = ["top", "--data-dir", str(service.data_dir)]
    shown = CliRunner().invoke(main, arguments)
    found = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).stdout)
    for account, batch in zip(accounts, made, strict=True):
        service.client(account).batches.cancel(batch.id)
    assert shown.exit_code == 0, shown.output
    assert all(batch.id in shown.stdout for batch in made)
    assert "top-0" in shown.stdout
    assert "upstream" in shown.stdout
    projects = {batch["batch_id"]: batch["project"] for batch in found["batches"]}
    assert [projects[batch.id] for batch in made] == ["top-0", "top-1"]
    assert "default" in [upstream["upstream"] for upstream in found["upstreams"]]


def test_a_folder_without_a_service_says_so(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "data")
    shell.text("keys", "create")
    shown = shell.text("top")
    assert shown.splitlines()[0] == "No service runs on this data folder."
    assert "No batch is open." in shown


def test_a_url_of_something_else_is_refused_in_words(tmp_path: Path) -> None:
    """A person may name the address of Grafana, which answers every path with a page."""
    shell = Shell(tmp_path / "data")
    shell.text("keys", "create")
    with answering(reply(200, b'<!doctype html>\n<html lang="en"><title>Grafana</title>')) as server:
        result = shell.call("top", "--url", server.url)
    assert result.exit_code == 1
    assert "is not a batchline service" in " ".join(result.stderr.split())


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_an_address_that_cannot_be_reached_is_a_failure(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """A script has to see it; what the database has is shown all the same."""
    shell = Shell(tmp_path / "data")
    shell.text("keys", "create")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    result = shell.call("top", "--url", url, *flags)
    assert result.exit_code == 1
    assert f"{url} cannot be reached. Is the service running" in " ".join(result.stderr.split())
    assert url in result.stdout


class _Metrics(BaseHTTPRequestHandler):
    """Answers as /metrics of a service with one upstream does."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'batchline_lines_in_flight{upstream="private"} 7\n')

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _metrics_over_tls(certificate: Path) -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), _Metrics) as server:
        server.socket = context_of(certificate).wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"https://localhost:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_certificate_that_the_system_trusts_is_trusted(tmp_path: Path) -> None:
    """As the other commands do. A company signs the certificates of its services itself."""
    Shell(tmp_path / "data").text("keys", "create")
    certificate = self_signed(tmp_path)
    with _metrics_over_tls(certificate) as url:
        shown = subprocess.run(
            [sys.executable, "-m", "batchline", "top", "--url", url, "--json", "--data-dir", str(tmp_path / "data")],
            env=os.environ | {"SSL_CERT_FILE": str(certificate)},
            check=True,
            capture_output=True,
        )
    assert b'"private"' in shown.stdout
