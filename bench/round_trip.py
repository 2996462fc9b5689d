"""Sends lines through batchline and times each step: upload, create, polls, download; then checks every line.

The client is as light as possible, and its own CPU time is in none of the figures.
"""

import json
import shutil
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from msgspec import Struct

from bench.lines import CHAT, Outcome, WrongResults, batches_of, check_results, write_input
from bench.services import Batchline
from bench.upstream import Upstream

POLL_SECONDS = 0.2
_TIMEOUT_SECONDS = 3600.0
"""Ends a run that hangs."""
_CHECK_SECONDS = 0.01
_FAST_POLL_SECONDS = 0.01
_BOUNDARY = "bench-boundary"


class Step(Struct, frozen=True, kw_only=True):
    """A step that is done for one batch after the other."""

    seconds: float
    bytes: int


class RoundTripTimes(Struct, frozen=True, kw_only=True):
    """How long a round trip and its steps took."""

    upload: Step
    create: Step
    """Its bytes are those of the input."""
    download: Step
    seconds: float
    """From the first byte of the upload to the last byte of the download."""
    polls: list[float]
    """The seconds of each of the regular polls, five per second."""
    tail_seconds: float | None
    """From the upstream's last answer until every batch is completed."""


class Client:
    """An HTTP client with one connection that is kept open."""

    def __init__(self, service: Batchline) -> None:
        self._connection = HTTPConnection("127.0.0.1", service.port, timeout=600)
        self._headers = service.headers

    def call(self, method: str, path: str, *, body: bytes | None = None, kind: str = "application/json") -> Any:
        with self.open(method, path, body=body, kind=kind) as response:
            return json.loads(response.read())

    def open(self, method: str, path: str, *, body: bytes | None = None, kind: str = "") -> HTTPResponse:
        self._connection.request(method, path, body=body, headers=self._headers | {"content-type": kind})
        response = self._connection.getresponse()
        if response.status != 200:
            raise WrongResults(f"{method} {path} was answered with {response.status}: {response.read()[:500]!r}")
        return response

    def close(self) -> None:
        self._connection.close()


class RoundTrip:
    """A round trip of lines. The input is written before the measured time, and the results are checked after it."""

    def __init__(
        self, service: Batchline, upstream: Upstream, folder: Path, *, lines: int, line_bytes: int = 0
    ) -> None:
        self._client = Client(service)
        self._upstream = upstream
        self._folder = folder
        self._lines = lines
        self._numbers = batches_of(lines)
        for part, numbers in enumerate(self._numbers):
            write_input(self._input(part), numbers, line_bytes=line_bytes)

    def run(self) -> RoundTripTimes:
        parts = range(len(self._numbers))
        began = monotonic()
        files = [self._upload(part) for part in parts]
        uploaded = monotonic()
        batches = [self._create(file_id) for file_id in files]
        created = monotonic()
        polls, completed, ended = self._wait(batches)
        download_started = monotonic()
        for part, batch in enumerate(completed):
            self._download(part, batch)
        downloaded = monotonic()
        last_answer = self._upstream.seen().last_answer
        sent = sum(self._input(part).stat().st_size for part in parts)
        return RoundTripTimes(
            upload=Step(seconds=uploaded - began, bytes=sent),
            create=Step(seconds=created - uploaded, bytes=sent),
            download=Step(seconds=downloaded - download_started, bytes=self._received()),
            seconds=downloaded - began,
            polls=polls,
            tail_seconds=ended - last_answer if last_answer else None,
        )

    def check(self) -> Outcome:
        """Check that every line came back once, and remove the files. Raise WrongResults if one did not."""
        answered = failed = 0
        for part, numbers in enumerate(self._numbers):
            outcome = check_results(self._output(part), self._errors(part), numbers)
            answered, failed = answered + outcome.answered, failed + outcome.failed
            for path in (self._input(part), self._output(part), self._errors(part)):
                path.unlink(missing_ok=True)
        self._client.close()
        return Outcome(answered=answered, failed=failed)

    def _upload(self, part: int) -> str:
        edge = f"--{_BOUNDARY}\r\ncontent-disposition: form-data; name="
        head = f'{edge}"purpose"\r\n\r\nbatch\r\n{edge}"file"; filename="in.jsonl"\r\n\r\n'.encode()
        body = head + self._input(part).read_bytes() + f"\r\n--{_BOUNDARY}--\r\n".encode()
        kind = f"multipart/form-data; boundary={_BOUNDARY}"
        file_id: str = self._client.call("POST", "/v1/files", body=body, kind=kind)["id"]
        return file_id

    def _create(self, file_id: str) -> str:
        request = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        batch_id: str = self._client.call("POST", "/v1/batches", body=json.dumps(request).encode())["id"]
        return batch_id

    def _wait(self, batch_ids: Sequence[str]) -> tuple[list[float], list[Any], float]:
        """Poll until all batches are completed; return the times of the polls, the batches and the moment.

        Once the upstream has answered all lines, further polls are made between the regular ones, and not counted.
        """
        polls: list[float] = []
        completed: list[Any] = []
        deadline = monotonic() + _TIMEOUT_SECONDS
        due, all_answered = monotonic(), False
        while monotonic() < deadline:
            all_answered = all_answered or self._upstream.seen().answered >= self._lines
            regular = monotonic() >= due
            if regular or all_answered:
                due = max(due + POLL_SECONDS, monotonic()) if regular else due
                batch, seconds = self._poll(batch_ids[len(completed)])
                polls += [seconds] if regular else []
                completed += [batch] if batch["status"] == "completed" else []
            if len(completed) == len(batch_ids):
                return polls, completed, monotonic()
            sleep(_FAST_POLL_SECONDS if all_answered else _CHECK_SECONDS)
        raise WrongResults(f"{batch_ids[len(completed)]} was not completed in time")

    def _poll(self, batch_id: str) -> tuple[Any, float]:
        began = monotonic()
        batch = self._client.call("GET", f"/v1/batches/{batch_id}")
        if batch["status"] in {"failed", "expired", "cancelled"}:
            raise WrongResults(f"{batch_id} is {batch['status']}")
        return batch, monotonic() - began

    def _download(self, part: int, batch: Any) -> None:
        for file_id, path in (
            (batch["output_file_id"], self._output(part)),
            (batch["error_file_id"], self._errors(part)),
        ):
            if file_id is not None:
                with self._client.open("GET", f"/v1/files/{file_id}/content") as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)

    def _received(self) -> int:
        parts = range(len(self._numbers))
        paths = [path(part) for part in parts for path in (self._output, self._errors)]
        return sum(path.stat().st_size for path in paths if path.exists())

    def _input(self, part: int) -> Path:
        return self._folder / f"input-{part}.jsonl"

    def _output(self, part: int) -> Path:
        return self._folder / f"output-{part}.jsonl"

    def _errors(self, part: int) -> Path:
        return self._folder / f"errors-{part}.jsonl"
