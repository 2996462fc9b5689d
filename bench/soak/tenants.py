"""The clients of the soak: tenants that run batches, and clients that are slow or leave."""

import json
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from threading import Event, Lock
from time import monotonic
from typing import Any

from tests.support.service import CHAT, FORM, Account, Service, call, chat_lines, credentials_of, upload_form

_TERMINAL = {"completed", "failed", "expired", "cancelled"}
_POLL_SECONDS = 0.5
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

    @contextmanager
    def timed_read(self) -> Iterator[None]:
        began = monotonic()
        yield
        with self.lock:
            self.read_seconds.append(monotonic() - began)


class Tenant:
    """Runs one batch after the other until it is told to stop, and accounts for each."""

    def __init__(self, service: Service, account: Account, tally: Tally, *, lines_per_second: float, seed: int) -> None:
        self._service, self._tally = service, tally
        self._credentials = credentials_of(account)
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
            call(self._service.port, "POST", f"/v1/batches/{batch['id']}/cancel", headers=self._credentials)
        while batch["status"] not in _TERMINAL:
            # A batch is followed to its end, also after the time of the run.
            Event().wait(_POLL_SECONDS)
            with self._tally.timed_read():
                batch = self._send("GET", f"/v1/batches/{batch['id']}")
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
                reply = call(self._service.port, "GET", f"/v1/files/{batch[name]}/content", headers=self._credentials)
                found.update(json.loads(line)["custom_id"] for line in reply.body.splitlines())
        if found != Counter(f"line-{n}" for n in range(lines)):
            self._tally.note_fault(f"{batch['id']} is {batch['status']} with {found.total()} of {lines} lines")
        self._tally.count(f"batches {batch['status']}")
        self._tally.count("lines accounted for", found.total())

    def _call_once(self) -> None:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hello"}]}).encode()
        reply = call(self._service.port, "POST", CHAT, body=body, headers=self._credentials)
        self._tally.count(f"calls {reply.status}")

    def read(self) -> None:
        """Read the two lists, as a console does."""
        for path in ("/v1/batches?limit=20", "/v1/files?limit=20"):
            with self._tally.timed_read():
                self._send("GET", path)

    def cut_upload(self) -> None:
        """Send half of an upload and leave."""
        with self._service.connect() as sock, suppress(OSError):
            head = {"host": "soak", "content-length": "200000", **FORM, **self._credentials}
            lines = ["POST /v1/files HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
            sock.sendall("\r\n".join(lines).encode() + upload_form(b"x" * 100_000)[:90_000])
        self._tally.count("uploads cut")

    def read_slowly(self, stop: Event) -> None:
        """Ask for the largest file and read nothing of it for a while, then leave."""
        listed = self._send("GET", "/v1/files?limit=20")["data"]
        if not listed:
            return
        largest = max(listed, key=lambda file: file["bytes"])["id"]
        with self._service.connect() as sock, suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            own = [f"{name}: {value}" for name, value in self._credentials.items()]
            lines = [f"GET /v1/files/{largest}/content HTTP/1.1", "host: soak", *own, "", ""]
            sock.sendall("\r\n".join(lines).encode())
            stop.wait(self._source.uniform(1, 5))
        self._tally.count("downloads left unread")

    def _send(self, method: str, path: str, *, body: bytes | None = None, headers: dict[str, str] | None = None) -> Any:
        reply = call(self._service.port, method, path, body=body, headers=self._credentials | (headers or {}))
        if reply.status != 200:
            raise RuntimeError(
                f"{method} {path.split('?', maxsplit=1)[0]} answered {reply.status}: {reply.body[:200]!r}"
            )
        return reply.json


def repeat(step: Callable[[], None], *, every: float, stop: Event, tally: Tally) -> None:
    """Repeat a step until the end. A service that answers with an error, or not at all, is a fault."""
    while not stop.wait(every):
        try:
            step()
        except (RuntimeError, OSError, HTTPException) as error:
            tally.note_fault(f"{type(error).__name__}: {error}")
