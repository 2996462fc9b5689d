"""The clients of the soak: tenants that run batches, and clients that are slow or leave."""

import json
import random
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Lock
from time import monotonic
from typing import Any

from tests.support.service import (
    CHAT,
    FORM,
    Account,
    Service,
    call,
    chat_lines,
    credentials_of,
    read_reply,
    upload_form,
)

_TERMINAL = {"completed", "failed", "expired", "cancelled"}
_POLL_SECONDS = 0.5
_BATCH_SECONDS = 300.0
"""The time after which a batch of at most 100 lines counts as one that never ends."""
_UPLOAD_PARTS = 10
_LINES = (5, 100)
"""The fewest and the most lines of a batch."""
_CANCELLED_SHARE, _DELETED_SHARE, _CALL_SHARE = 0.15, 0.5, 0.5


@dataclass
class Tally:
    """What all clients did and found. Threads add to it under its lock."""

    lock: Lock = field(default_factory=Lock)
    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    read_seconds: list[float] = field(default_factory=list)

    def count(self, what: str, times: int = 1) -> None:
        with self.lock:
            self.done[what] += times

    def note_fault(self, what: str) -> None:
        with self.lock:
            self.faults.append(what)

    def note_reads(self, lines: list[str]) -> None:
        """Add what the reader wrote: the seconds of each read, or a fault."""
        for line in lines:
            try:
                self.read_seconds.append(float(line))
            except ValueError:
                self.note_fault(line)


class Tenant:
    """Runs one batch after the other until it is told to stop, and accounts for each."""

    def __init__(self, service: Service, account: Account, tally: Tally, *, lines_per_second: float, seed: int) -> None:
        self._service, self._tally = service, tally
        self.credentials = credentials_of(account)
        self._lines_per_second = lines_per_second
        self._source = random.Random(seed)

    def run(self, stop: Event) -> None:
        while not stop.is_set():
            began = monotonic()
            lines = self._source.randint(*_LINES)
            try:
                self._run_batch(lines, stop)
                if self._source.random() < _CALL_SHARE:
                    self._call_once()
            except Exception as error:  # noqa: BLE001 (a tenant that dies would hide everything after it)
                self._tally.note_fault(f"{type(error).__name__}: {error}")
            stop.wait(max(0.0, lines / self._lines_per_second - (monotonic() - began)))

    def _run_batch(self, lines: int, stop: Event) -> None:
        data = chat_lines(f"word {self._source.random()} {n}" for n in range(lines))
        uploaded = self._send("POST", "/v1/files", body=upload_form(data), headers=FORM)
        create = json.dumps({"input_file_id": uploaded["id"], "endpoint": CHAT, "completion_window": "24h"}).encode()
        batch = self._send("POST", "/v1/batches", body=create)
        self._tally.count("batches created")
        self._tally.count("lines created", lines)
        cancels = self._source.random() < _CANCELLED_SHARE
        if cancels:
            stop.wait(self._source.uniform(0, 1))
            call(self._service.port, "POST", f"/v1/batches/{batch['id']}/cancel", headers=self.credentials)
        deadline = monotonic() + _BATCH_SECONDS
        while batch["status"] not in _TERMINAL:
            # A batch is followed to its end, also after the time of the run.
            Event().wait(_POLL_SECONDS)
            batch = self._send("GET", f"/v1/batches/{batch['id']}")
            if monotonic() > deadline:
                raise TimeoutError(f"{batch['id']} is still {batch['status']} after {_BATCH_SECONDS:.0f} s")
        self._account_for(batch, lines)
        if self._source.random() < _DELETED_SHARE:
            for file_id in filter(None, (uploaded["id"], batch["output_file_id"], batch["error_file_id"])):
                self._send("DELETE", f"/v1/files/{file_id}")
                self._tally.count("files deleted")

    def _account_for(self, batch: dict[str, object], lines: int) -> None:
        """Note a fault unless every line is in one of the two files, once."""
        found: Counter[str] = Counter()
        for name in ("output_file_id", "error_file_id"):
            if batch[name] is not None:
                reply = call(self._service.port, "GET", f"/v1/files/{batch[name]}/content", headers=self.credentials)
                found.update(json.loads(line)["custom_id"] for line in reply.body.splitlines())
        if found != Counter(f"line-{n}" for n in range(lines)):
            self._tally.note_fault(f"{batch['id']} is {batch['status']} with {found.total()} of {lines} lines")
        self._tally.count(f"batches {batch['status']}")
        self._tally.count("lines accounted for", found.total())

    def _call_once(self) -> None:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
        reply = call(self._service.port, "POST", CHAT, body=body, headers=self.credentials)
        self._tally.count(f"calls {reply.status}")

    def upload_slowly(self, stop: Event) -> None:
        """Send an upload in parts over some seconds, and delete the file."""
        form = upload_form(chat_lines(f"slow {n}" for n in range(100)))
        with self._service.connect() as sock:
            sock.sendall(self._head("POST /v1/files", {"content-length": str(len(form)), **FORM}))
            for part in range(_UPLOAD_PARTS):
                sock.sendall(form[len(form) * part // _UPLOAD_PARTS : len(form) * (part + 1) // _UPLOAD_PARTS])
                stop.wait(0.3)
            reply = read_reply(sock)
        if reply.status != 200:
            raise RuntimeError(f"a slow upload was answered with {reply.status}: {reply.body[:200]!r}")
        self._send("DELETE", f"/v1/files/{reply.json['id']}")
        self._tally.count("uploads made slowly")

    def leave_stream(self, stop: Event) -> None:
        """Ask for a streamed answer, read its beginning, and leave."""
        messages = [{"role": "user", "content": "[[pause=0.2]] one two three four five six seven eight"}]
        body = json.dumps({"model": "m", "stream": True, "messages": messages}).encode()
        self._leave("POST " + CHAT, {"content-length": str(len(body))}, stop, body=body)
        self._tally.count("streams left")

    def leave_results(self, stop: Event) -> None:
        """Ask for the stream of results of the newest batch, read its beginning, and leave."""
        listed = self._send("GET", "/v1/batches?limit=1")["data"]
        if listed:
            self._leave(f"GET /v1/batches/{listed[0]['id']}/results", {"accept": "text/event-stream"}, stop)
            self._tally.count("result streams left")

    def cut_upload(self) -> None:
        """Send half of an upload and leave."""
        with self._service.connect() as sock, suppress(OSError):
            head = self._head("POST /v1/files", {"content-length": "200000", **FORM})
            sock.sendall(head + upload_form(b"x" * 100_000)[:90_000])
        self._tally.count("uploads cut")

    def read_slowly(self, stop: Event) -> None:
        """Ask for the largest file and read nothing of it for a while, then leave."""
        listed = self._send("GET", "/v1/files?limit=20")["data"]
        if not listed:
            return
        largest = max(listed, key=lambda file: file["bytes"])["id"]
        with self._service.connect() as sock, suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(self._head(f"GET /v1/files/{largest}/content", {}))
            stop.wait(self._source.uniform(1, 5))
        self._tally.count("downloads left unread")

    def _leave(self, start: str, headers: dict[str, str], stop: Event, *, body: bytes = b"") -> None:
        with self._service.connect() as sock, suppress(OSError):
            sock.sendall(self._head(start, headers) + body)
            sock.recv(100)
            stop.wait(self._source.uniform(0, 1))

    def _head(self, start: str, headers: dict[str, str]) -> bytes:
        fields = {"host": "soak", **headers, **self.credentials}
        return "\r\n".join([f"{start} HTTP/1.1", *map(": ".join, fields.items()), "", ""]).encode()

    def _send(self, method: str, path: str, *, body: bytes | None = None, headers: dict[str, str] | None = None) -> Any:
        reply = call(self._service.port, method, path, body=body, headers=self.credentials | (headers or {}))
        if reply.status != 200:
            raise RuntimeError(
                f"{method} {path.split('?', maxsplit=1)[0]} answered {reply.status}: {reply.body[:200]!r}"
            )
        return reply.json


def repeat(step: Callable[[], None], *, every: float, stop: Event, tally: Tally) -> None:
    """Repeat a step until the end. Any error is a fault, and the step goes on to be repeated."""
    while not stop.wait(every):
        try:
            step()
        except Exception as error:  # noqa: BLE001 (a thread that dies would hide everything after it)
            tally.note_fault(f"{type(error).__name__}: {error}")
