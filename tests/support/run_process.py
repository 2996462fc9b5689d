"""Runs `batchline run` as a process, with its own project on a server that tests share."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil  # type: ignore[import-untyped]

from tests.support.fork_server import ForkedProcess, fork
from tests.support.service import PATIENCE, Service, credentials_of

Environment = dict[str, str]


class Ran(NamedTuple):
    """The exit code and output of a run that has ended."""

    code: int
    stdout: str
    stderr: str

    @property
    def summary(self) -> Any:
        """The JSON that ``--json`` printed."""
        return json.loads(self.stdout)


def _start_anew(
    arguments: Sequence[str], environment: Environment, *, cwd: Path, stdout: IO[Any], stderr: IO[Any]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        cwd=cwd,
    )


class Run:
    """A process of the command, in its own folder."""

    def __init__(
        self, folder: Path, *arguments: str, environment: Environment | None = None, anew: bool = False
    ) -> None:
        """``anew`` starts a new interpreter, as a user does, instead of a fork that has imported batchline."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("BATCHLINE_")}
        self._written = [folder / "run.stdout", folder / "run.stderr"]
        with self._written[0].open("w") as stdout, self._written[1].open("w") as stderr:
            start = _start_anew if anew else fork
            self._process: subprocess.Popen[bytes] | ForkedProcess = start(
                ["-m", "batchline", "run", *arguments],
                inherited | (environment or {}),
                cwd=folder,
                stdout=stdout,
                stderr=stderr,
            )

    def children(self) -> list[psutil.Process]:
        """Return the service of the run, and the children of that service."""
        found: list[psutil.Process] = psutil.Process(self._process.pid).children(recursive=True)
        return found

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(PATIENCE)

    def end(self) -> Ran:
        """Wait until the process ends."""
        code = self._process.wait(PATIENCE)
        return Ran(code, *(path.read_text() for path in self._written))


@contextmanager
def running(folder: Path, *arguments: str, environment: Environment | None = None, anew: bool = False) -> Iterator[Run]:
    """Start a run, and kill it at the end if it still runs."""
    run = Run(folder, *arguments, environment=environment, anew=anew)
    try:
        yield run
    finally:
        run.kill()


def ran(folder: Path, *arguments: str, environment: Environment | None = None) -> Ran:
    """Run the command until it ends."""
    with running(folder, *arguments, environment=environment) as run:
        return run.end()


class Tenant(NamedTuple):
    """A project on a service that tests share, so that each test can count its own batches."""

    service: Service
    account: dict[str, str]

    def environment(self, url: str | None = None) -> Environment:
        return {
            "BATCHLINE_BASE_URL": url or self.service.base_url,
            "BATCHLINE_API_KEY": self.account["api_key"],
            "BATCHLINE_PROJECT_ID": self.account["project_id"],
        }

    def batches(self) -> list[Any]:
        answer = self.service.call("GET", "/v1/batches?limit=100", headers=credentials_of(self.account))
        found: list[Any] = answer.json["data"]
        return found


def names_in(path: Path) -> list[str]:
    """Return the custom ids in a file of results."""
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


def names(count: int) -> list[str]:
    return [f"line-{number}" for number in range(count)]


def is_gone(processes: Sequence[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in processes)


@contextmanager
def ended_with_the_test(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Kill the processes at the end if they still run."""
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
