"""Runs the service and its upstream as real processes, for tests that use them as a client does, or kill them."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from select import select
from threading import Lock, Thread
from typing import IO, Any, Final, NamedTuple

import psutil  # type: ignore[import-untyped]
from click.testing import CliRunner
from openai import OpenAI
from openai.types import Batch

from batchline.cli import main
from tests.support.fork_server import ForkedProcess, fork

CHAT: Final = "/v1/chat/completions"
PATIENCE = 300.0
"""Seconds after which a wait fails. It only ends a hang: no test depends on its length."""

Account = dict[str, str]
"""The output of ``batchline keys create``: api_key, project_id, key_id."""

_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS, _POLL_GROWTH = 0.01, 0.06, 1.2
"""A wait polls less and less often: many polls during a long wait would take time from the other tests."""
_TERMINAL = frozenset({"completed", "failed", "expired", "cancelled"})


def credentials_of(account: Account) -> dict[str, str]:
    return {"x-api-key": account["api_key"], "x-project-id": account["project_id"]}


def wait_until(met: Callable[[], bool], *, what: str) -> None:
    """Poll until ``met`` returns True; ``what`` names it in the message of a failure."""
    give_up, pauses = time.monotonic() + PATIENCE, poll_pauses()
    while not met():
        assert time.monotonic() < give_up, f"waited {PATIENCE:.0f} s for {what}"
        time.sleep(next(pauses))


def poll_pauses() -> Iterator[float]:
    """Yield the seconds between one poll and the next, without end."""
    seconds = _FIRST_POLL_SECONDS
    while True:
        yield seconds
        seconds = min(_LAST_POLL_SECONDS, seconds * _POLL_GROWTH)


class Reply(NamedTuple):
    status: int
    headers: HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of the body, which must have every field of the envelope (A6)."""
        error: dict[str, Any] = self.json["error"]
        assert set(error) - {"line"} == {"message", "type", "code", "param"}
        assert re.fullmatch(r"req_\w+", self.headers["x-request-id"])
        return error


def call(port: int, method: str, path: str, *, body: bytes | None = None, headers: dict[str, str]) -> Reply:
    with closing(HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as connection:
        connection.request(method, path, body=body, headers=headers)
        response = connection.getresponse()
        return Reply(response.status, response.headers, response.read())


def read_reply(connection: socket.socket) -> Reply:
    """Return the reply to a request that a test wrote to the socket itself."""
    with closing(HTTPResponse(connection)) as response:
        response.begin()
        return Reply(response.status, response.headers, response.read())


def _started(
    arguments: Sequence[str], environment: Mapping[str, str], *, forked: bool, log: IO[bytes]
) -> subprocess.Popen[bytes] | ForkedProcess:
    if forked:
        return fork(arguments, environment, cwd=Path.cwd(), stdout=log, stderr=log)
    return subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
    )


class Program:
    """A Python process. A thread reads what it writes, so that the process never waits for a reader."""

    def __init__(
        self, *arguments: str, environment: Mapping[str, str] | None = None, forked: bool | None = None
    ) -> None:
        """``forked`` says if the process is a fork that has imported batchline; by default, ``-m batchline`` is one."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("BATCHLINE_")}
        if forked is None:
            forked = arguments[:2] == ("-m", "batchline")
        self._log, theirs = os.pipe()
        os.set_blocking(self._log, False)
        with os.fdopen(theirs, "wb") as log:
            self._process = _started(arguments, inherited | dict(environment or {}), forked=forked, log=log)
        self._family = set[psutil.Process]()
        with suppress(psutil.NoSuchProcess):  # it may have ended already
            self._family.add(psutil.Process(self._process.pid))
        self._written, self._reading, self._whole = bytearray(), Lock(), False
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        """Everything that the process has written until now."""
        self._read_written()
        return self._written.decode(errors="replace")

    @property
    def exit_code(self) -> int | None:
        """The exit code: None while the process runs, negative if a signal ended it."""
        return self._process.poll()

    def family(self) -> list[psutil.Process]:
        """The process and its children."""
        with suppress(psutil.NoSuchProcess):
            self._family.update(psutil.Process(self.pid).children(recursive=True))
        return [member for member in self._family if member.is_running()]

    def wait_for_log(self, pattern: str) -> str:
        """Wait until the log matches, and return the first group of the first match."""
        found: list[re.Match[str]] = []

        def is_logged() -> bool:
            found.extend(re.finditer(pattern, self.log))
            assert found or self.exit_code is None, f"ended with {self.exit_code}:\n{self.log}"
            return bool(found)

        wait_until(is_logged, what=f"the log line {pattern}")
        return found[0][1]

    def send(self, number: signal.Signals) -> None:
        self.family()  # a process that died can no longer be asked for its children
        self._process.send_signal(number)

    def wait(self) -> int:
        return self._process.wait(PATIENCE)

    def end(self) -> None:
        """Kill the process and its children, in whatever state they are."""
        for member in self.family():
            with suppress(psutil.NoSuchProcess):
                member.kill()
        self.wait()
        self._reader.join(PATIENCE)
        assert not self._reader.is_alive(), "a process still holds the other end of the log"

    def _read(self) -> None:
        while not self._whole:
            select([self._log], [], [])
            self._read_written()
        os.close(self._log)

    def _read_written(self) -> None:
        with self._reading, suppress(BlockingIOError):
            while not self._whole:
                written = os.read(self._log, 1 << 16)
                self._written += written
                self._whole = not written


class Mock:
    """A running ``batchline mock``."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.url = program.wait_for_log(r"(http://\S+)")
        self.port = int(re.findall(r":(\d+)", self.url)[0])

    def stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = call(self.port, "GET", "/stats", headers={}).json
        return stats

    def follow(self, **plan: Any) -> None:
        """Replace the plan of the mock."""
        assert call(self.port, "POST", "/script", body=json.dumps(plan).encode(), headers={}).status == 200


@contextmanager
def running_mock(**options: object) -> Iterator[Mock]:
    """Run ``batchline mock`` with these flags."""
    program = Program("-m", "batchline", "mock", *_flags({"port": 0} | options))
    try:
        yield Mock(program)
    finally:
        program.end()


class Service:
    """``batchline serve`` or another role, with the same settings for each of the processes that a test starts."""

    def __init__(
        self,
        data_dir: Path,
        command: Sequence[str],
        settings: dict[str, object],
        *,
        account: Account | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.data_dir = data_dir
        self._environment = environment
        self._command = (*command, *_flags(settings | {"data_dir": data_dir, "port": 0}))
        shared = {name: value for name, value in settings.items() if name == "database_url"}
        self._store = _flags({"data_dir": data_dir} | shared)
        self._processes: list[Program] = []
        self._clients: dict[tuple[object, ...], OpenAI] = {}
        self.port = 0
        self.account = account or self.new_account("default")

    @property
    def program(self) -> Program:
        return self._processes[-1]

    @property
    def pid(self) -> int:
        return self.program.pid

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def log(self) -> str:
        """The logs of all processes, in the order of their starts."""
        return "".join(process.log for process in self._processes)

    @property
    def credentials(self) -> dict[str, str]:
        return credentials_of(self.account)

    def new_account(self, project: str) -> Account:
        made: Account = json.loads(self.keys("create", "--json", "--project", project))
        return made

    def client(self, account: Account | None = None, *, max_retries: int = 0) -> OpenAI:
        """Return the official client, which is closed with the service."""
        credentials = credentials_of(account or self.account)
        key = (self.port, max_retries, *credentials.values())
        if key not in self._clients:
            self._clients[key] = OpenAI(
                base_url=self.base_url, api_key="unused", default_headers=credentials, max_retries=max_retries
            )
        return self._clients[key]

    def call(
        self, method: str, path: str, *, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        return call(self.port, method, path, body=body, headers=self.credentials | (headers or {}))

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def head(self, path: str, *, length: int, headers: dict[str, str]) -> bytes:
        """Return the head of a POST, for a test that writes to the socket itself."""
        fields = self.credentials | {"host": "test", "content-length": str(length)} | headers
        return "\r\n".join([f"POST {path} HTTP/1.1", *map(": ".join, fields.items()), "", ""]).encode()

    def keys(self, *arguments: str) -> str:
        return self.command("keys", *arguments)

    def command(self, *arguments: str) -> str:
        """Run ``batchline …`` on the service's database, and return its output. The service may run."""
        result = CliRunner().invoke(main, [*arguments, *self._store])
        assert result.exit_code == 0, result.output
        return result.stdout

    def start(self) -> None:
        """Start a process, and do not wait until it is ready."""
        forked = self._command[0] != "-c"
        self._processes.append(Program(*self._command, environment=self._environment, forked=forked))

    def await_ready(self) -> None:
        self.port = int(self.program.wait_for_log(r"batchline.* listens.* url=http://127\.0\.0\.1:(\d+)"))
        wait_until(lambda: self.is_ready() or self.program.exit_code is not None, what="/readyz")
        assert self.program.exit_code is None, self.program.log

    def is_ready(self) -> bool:
        try:
            reply = self.call("GET", "/readyz")
            return reply.status == 200 and reply.json["status"] == "ready"
        except (OSError, HTTPException):
            return False

    def kill(self) -> None:
        """End the process with SIGKILL, so that it cannot shut down cleanly."""
        self.program.send(signal.SIGKILL)
        self.program.wait()

    def terminate(self) -> int:
        """Send SIGTERM, and return the exit code."""
        self.program.send(signal.SIGTERM)
        return self.program.wait()

    def restart(self) -> None:
        """Stop the process if it runs, and start another one with the same settings."""
        if self.program.exit_code is None:
            self.terminate()
        self.start()
        self.await_ready()

    def end(self) -> None:
        for client in self._clients.values():
            client.close()
        for process in self._processes:
            process.end()


@contextmanager
def running_service(
    folder: Path, upstream_url: str, *, command: Sequence[str] = ("-m", "batchline", "serve"), **settings: object
) -> Iterator[Service]:
    service = Service(folder / "data", command, settings | {"upstream_url": upstream_url})
    try:
        service.start()
        service.await_ready()
        yield service
    finally:
        service.end()


FORM = {"content-type": "multipart/form-data; boundary=edge"}


def upload_form(data: bytes) -> bytes:
    """Return the body of an upload, to be sent with the headers ``FORM``."""
    purpose = b'--edge\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    file = b'--edge\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    return purpose + file + data + b"\r\n--edge--\r\n"


def chat_line(custom_id: str, prompt: str) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": prompt}]}
    line = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def chat_lines(prompts: Iterable[str]) -> bytes:
    """Return an input file whose lines are named line-0, line-1 and so on."""
    return b"".join(chat_line(f"line-{number}", prompt) for number, prompt in enumerate(prompts))


def submit(client: OpenAI, lines: bytes) -> Batch:
    uploaded = client.files.create(file=lines, purpose="batch")
    return client.batches.create(input_file_id=uploaded.id, endpoint=CHAT, completion_window="24h")


def counts_of(batch: Batch) -> tuple[int, int, int]:
    """Return the counts total, completed and failed."""
    counts = batch.request_counts
    assert counts is not None
    return counts.total, counts.completed, counts.failed


def await_end(client: OpenAI, batch_id: str) -> Batch:
    """Wait until the batch is terminal, and return it. Until then neither count may fall (C12)."""
    last, pauses = (0, 0), poll_pauses()
    give_up = time.monotonic() + PATIENCE
    while True:
        batch = client.batches.retrieve(batch_id)
        total, *done = counts_of(batch)
        assert done[0] >= last[0], "completed fell"
        assert done[1] >= last[1], "failed fell"
        last = (done[0], done[1])
        if batch.status in _TERMINAL:
            assert batch.status == "failed" or sum(last) == total
            return batch
        assert time.monotonic() < give_up, f"waited {PATIENCE:.0f} s for the end of {batch}"
        time.sleep(next(pauses))


def results_of(client: OpenAI, batch: Batch, lines: bytes) -> dict[str, Any]:
    """Return the records of both files by custom_id, after a check that every line is in one of them, once (C12)."""
    output, errors = (_records(client, file_id) for file_id in (batch.output_file_id, batch.error_file_id))
    assert counts_of(batch)[1:] == (len(output), len(errors))
    assert all(record["error"] is None and record["response"]["status_code"] == 200 for record in output)
    assert all(record["response"] is None for record in errors)
    sent = Counter(json.loads(line)["custom_id"] for line in lines.splitlines())
    assert Counter(record["custom_id"] for record in output + errors) == sent
    return {record["custom_id"]: record for record in output + errors}


def _records(client: OpenAI, file_id: str | None) -> list[Any]:
    """Return the records of a file, which exists if and only if it has lines."""
    if file_id is None:
        return []
    records = [json.loads(line) for line in client.files.content(file_id).content.splitlines()]
    assert records
    return records


def _flags(options: dict[str, object]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
