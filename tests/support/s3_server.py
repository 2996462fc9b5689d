"""Runs a real S3 server, SeaweedFS, on loopback as the user of the tests.

The fixture ``seaweed`` is the server that all tests share, ``bucket`` is the same with the environment set for it, and
``own_bucket`` is a server for one test, which may kill it.
PYTEST_DONT_REWRITE: pytest need not warn when this module is imported before it is a plugin.
"""

import json
import os
import random
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path

import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

from tests.support.service import Program, call, wait_until

KEY, SECRET = "batchline-tests", "not-a-secret-of-anybody"

_BUCKET = "batchline"
_PORTS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
)
# Ends the server when the tests end, also if they are killed and cannot end it themselves.
SUPERVISOR = """
import os, subprocess, sys, time
parent = os.getppid()
server = subprocess.Popen(sys.argv[1:])
while os.getppid() == parent and server.poll() is None:
    time.sleep(0.1)
server.kill()
sys.exit(server.wait())
"""


class Seaweed:
    """A server on one folder and the same ports for each of the processes that a test starts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ports = dict(zip(_PORTS, _free_ports(len(_PORTS)), strict=True))
        self._processes: list[Program] = []
        self._names = count()

    @property
    def port(self) -> int:
        return self._ports["s3.port"]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """The usual variables for a process that uses the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "NO_PROXY": "127.0.0.1",
        }

    def new_url(self) -> str:
        """Return ``s3://bucket/prefix`` with a new prefix."""
        return f"s3://{_BUCKET}/tests/{next(self._names)}"

    def keys(self, url: str) -> list[str]:
        """Return the keys below a URL of this server."""
        prefix = url.removeprefix(f"s3://{_BUCKET}/")
        return sorted(found["path"] for page in self._store().list(prefix) for found in page)

    def copy(self, source: str, target: str) -> None:
        """Copy every object below one URL of this server to another one."""
        store, prefixes = self._store(), [url.removeprefix(f"s3://{_BUCKET}/") for url in (source, target)]
        for key in self.keys(source):
            store.copy(key, prefixes[1] + key.removeprefix(prefixes[0]))

    def unfinished_uploads(self) -> list[str]:
        """Return the uploads that were neither completed nor aborted, from the folder in which SeaweedFS keeps them."""
        reply = call(
            self._ports["filer.port"], "GET", f"/buckets/{_BUCKET}/.uploads/", headers={"accept": "application/json"}
        )
        return [] if reply.status == 404 else [entry["FullPath"] for entry in reply.json["Entries"] or []]

    def start(self) -> None:
        self._folder.mkdir(exist_ok=True)
        self._processes.append(Program("-c", SUPERVISOR, *self._command()))
        wait_until(self._is_ready, what=f"SeaweedFS on {self.endpoint}")

    def kill(self) -> None:
        """End the server with SIGKILL, so that it cannot shut down cleanly."""
        self._processes[-1].end()
        for port in self._ports.values():
            # The server makes these in /tmp, wherever its folder is.
            for left in Path("/tmp").glob(f"seaweedfs-*-grpc-{port}.sock"):
                left.unlink(missing_ok=True)

    def _command(self) -> list[str]:
        config = self._folder / "s3.json"
        config.write_text(json.dumps({"identities": [_identity()]}))
        options = {
            "dir": self._folder,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "filer": "true",
            "filer.localSocket": self._folder / "filer.sock",
            "s3": "true",
            "s3.config": config,
            "s3.localSocket": self._folder / "s3.sock",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "master.telemetry": "false",
            # How long a restarted server waits for others that might lead.
            "master.electionTimeout": "1s",
            "master.volumeSizeLimitMB": 256,
            "volume.max": 20,
            **self._ports,
        }
        weed = str(Path(sys.executable).with_name("weed"))
        return [weed, "-logtostderr=true", "server", *(f"-{name}={value}" for name, value in options.items())]

    def _is_ready(self) -> bool:
        process = self._processes[-1]
        assert process.exit_code is None, f"ended with {process.exit_code}:\n{process.log}"
        store = self._store()
        try:
            # The first write makes the bucket. A restarted server finds older objects a while after all else works.
            if len(self._processes) > 1:
                store.get("ready")
            store.put("ready", b"x")
            store.get("ready")
        except (BaseError, FileNotFoundError):
            return False
        return True

    def _store(self) -> S3Store:
        return S3Store(
            _BUCKET,
            endpoint=self.endpoint,
            access_key_id=KEY,
            secret_access_key=SECRET,
            region="us-east-1",
            client_options={"allow_http": True, "timeout": timedelta(seconds=5)},
            retry_config={"max_retries": 0},
        )


@contextmanager
def running_seaweed(folder: Path) -> Iterator[Seaweed]:
    server = Seaweed(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    with running_seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture
def bucket(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Seaweed:
    """Return the shared server, with the environment set for it."""
    return _with_environment(seaweed, monkeypatch)


@pytest.fixture
def own_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Seaweed]:
    """Run a server for one test, which may kill it, with the environment set for it."""
    with running_seaweed(tmp_path / "seaweed") as server:
        yield _with_environment(server, monkeypatch)


def _with_environment(server: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Seaweed:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


def _identity() -> dict[str, object]:
    return {
        "name": "tests",
        "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }


def _free_ports(wanted: int) -> list[int]:
    """Return ports below the range of outgoing connections, so that none takes them while the server is down."""
    seed = random.Random(time.time_ns())
    with ExitStack() as held:
        ports: list[int] = []
        while len(ports) < wanted:
            sock = held.enter_context(socket.socket())
            try:
                sock.bind(("127.0.0.1", seed.randrange(15_000, 32_000)))
            except OSError:
                continue
            ports.append(sock.getsockname()[1])
        return ports
