"""Attacks on a real process, from outside, with figures: memory, delays, money."""

import json
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from threading import Event
from time import monotonic
from typing import NamedTuple

import psutil  # type: ignore[import-untyped]
from openai import OpenAI

from tests.support.service import (
    CHAT,
    FORM,
    Account,
    Service,
    await_end,
    call,
    chat_lines,
    credentials_of,
    running_mock,
    running_service,
    submit,
    upload_form,
)

MiB = 1024 * 1024
_TINY = b"GET /healthz HTTP/1.1\r\nhost:\r\n\r\n"
_WITH_FEW_DESCRIPTORS = (
    "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); sys.argv[0] = 'batchline'; "
    "runpy.run_module('batchline', run_name='__main__')"
)
_PRICED = """
metering = true
[models.m]
input_price = 1000
output_price = 1000
"""


class Shown(NamedTuple):
    """What an attack did, and whether that is within its bound."""

    now: str
    bound: str
    holds: bool


@contextmanager
def _service(*, command: tuple[str, ...] = ("-m", "batchline", "serve"), **settings: object) -> Iterator[Service]:
    with (
        tempfile.TemporaryDirectory() as folder,
        running_mock() as mock,
        running_service(Path(folder), mock.url, command=command, **settings) as service,
    ):
        yield service


def _megabytes(service: Service) -> float:
    resident: int = sum(process.memory_info().rss for process in service.program.family())
    return resident / 1e6


def _seconds(work: Callable[[], object]) -> float:
    began = monotonic()
    work()
    return monotonic() - began


def _health_seconds(service: Service) -> float:
    return max(_seconds(lambda: call(service.port, "GET", "/healthz", headers={})) for _ in range(5))


def pipelining() -> Shown:
    """Send 5 times 4 MB of tiny requests and read no answer."""
    with _service() as service, ExitStack() as stack:
        before = _megabytes(service)
        for _ in range(5):
            sock = stack.enter_context(service.connect())
            sock.settimeout(1)
            flood, sent = _TINY * (4 * MiB // len(_TINY)), 0
            try:
                while sent < len(flood):
                    sent += sock.send(flood[sent : sent + MiB])
            except TimeoutError:
                pass
        health = _health_seconds(service)
        after = _megabytes(service)
        return Shown(
            f"{before:.0f} to {after:.0f} MB, /healthz {1000 * health:.0f} ms",
            bound="100 MB more, 1 s",
            holds=after < before + 100 and health < 1,
        )


def unread_downloads() -> Shown:
    """Ask 20 times for a large file and read nothing."""
    with _service(write_timeout_seconds=2) as service, ExitStack() as stack:
        file_id = service.client().files.create(file=b"x" * 32 * MiB, purpose="batch").id
        others = _established(service)
        own = [f"{name}: {value}" for name, value in service.credentials.items()]
        head = "\r\n".join([f"GET /v1/files/{file_id}/content HTTP/1.1", "host: a", *own, "", ""]).encode()
        for _ in range(20):
            sock = stack.enter_context(service.connect())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(head)
        return _left(service, others, 20)


def unread_answers() -> Shown:
    """Make 20 calls whose answers of 4 MB are not read."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "[[huge=4000000]]"}]}).encode()
    with _service(write_timeout_seconds=2) as service, ExitStack() as stack:
        before, others = _megabytes(service), _established(service)
        for _ in range(20):
            _send_unread(service, stack, body)
        shown = _left(service, others, 20)
        after = _megabytes(service)
        return Shown(
            f"{shown.now}; {before:.0f} to {after:.0f} MB",
            bound=f"{shown.bound}; 250 MB more",
            holds=shown.holds and after < before + 250,
        )


def unread_streams() -> Shown:
    """Leave 8 streams unread, and run a batch of another tenant beside them."""
    text = "[[huge=4000000]]"
    body = json.dumps({"model": "m", "stream": True, "messages": [{"role": "user", "content": text}]}).encode()
    with _service(max_concurrency=16) as service, ExitStack() as stack:
        client = service.client(service.new_account("other"))
        alone = _batch_seconds(client, "alone")
        for _ in range(8):
            _send_unread(service, stack, body)
        beside = _batch_seconds(client, "beside")
        return Shown(
            f"a batch takes {alone:.1f} s alone and {beside:.1f} s beside them",
            bound="3 times as long and 2 s",
            holds=beside < 3 * alone + 2,
        )


def _send_unread(service: Service, stack: ExitStack, body: bytes) -> None:
    sock = stack.enter_context(service.connect())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.sendall(service.head(CHAT, length=len(body), headers={}) + body)


def _batch_seconds(client: OpenAI, name: str) -> float:
    return _seconds(lambda: await_end(client, submit(client, chat_lines(f"{name} {n}" for n in range(300))).id))


def _left(service: Service, others: int, opened: int) -> Shown:
    """Wait until the connections that read nothing are closed, and say how many were not."""
    began = monotonic()
    while (left := _established(service) - others) > 0 and monotonic() < began + 60:
        Event().wait(0.1)
    return Shown(
        f"{left} of {opened} are left after {monotonic() - began:.1f} s, with a write timeout of 2 s",
        bound="none after 60 s",
        holds=left <= 0,
    )


def _established(service: Service) -> int:
    """Return how many connections of clients the service has open."""
    return sum(
        connection.status == psutil.CONN_ESTABLISHED and connection.laddr.port == service.port
        for connection in psutil.Process(service.pid).net_connections("tcp")
    )


def synchronous_bodies() -> Shown:
    """Make 100 calls of nearly 4 MiB at once that the upstream never answers."""
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "[[hang]]" + "x" * (4 * MiB - 200)}]})
    head = "\r\n".join([f"POST {CHAT} HTTP/1.1", "host: a", f"content-length: {len(body)}"])
    with _service(max_attempts=1) as service, ExitStack() as stack:
        own = "".join(f"\r\n{name}: {value}" for name, value in service.credentials.items())
        before, refused = _megabytes(service), 0
        for _ in range(100):
            sock = stack.enter_context(service.connect())
            sock.settimeout(20)
            sock.sendall((head + own + "\r\n\r\n").encode() + body.encode())
            sock.settimeout(0.05)
            with suppress(TimeoutError):
                refused += b" 429 " in sock.recv(100)
        after = _megabytes(service)
        return Shown(
            f"{refused} of 100 get 429; {before:.0f} to {after:.0f} MB",
            bound="at least 80, 250 MB more",
            holds=refused >= 80 and after < before + 250,
        )


def connections() -> Shown:
    """Open 300 connections without a key and say nothing, at a process with 256 descriptors, while a batch runs.

    The upstream gets 64 connections at most: with so few descriptors, those of the batch itself could be too many.
    """
    few = ("-c", _WITH_FEW_DESCRIPTORS, "serve")
    with _service(command=few, max_concurrency=64) as service, ExitStack() as stack:
        client = service.client()
        alone = _batch_seconds(client, "alone")
        for _ in range(300):
            stack.enter_context(service.connect())
        health = _health_seconds(service)
        batch = submit(client, chat_lines(f"again {n}" for n in range(300)))
        beside = _seconds(lambda: await_end(client, batch.id))
        counts = client.batches.retrieve(batch.id).request_counts
        assert counts is not None
        return Shown(
            f"a batch takes {alone:.1f} s alone and {beside:.1f} s beside them, {counts.failed} lines fail, "
            f"a newcomer waits {1000 * health:.0f} ms",
            bound="3 times as long and 2 s, no line fails, 5 s",
            holds=beside < 3 * alone + 2 and counts.failed == 0 and health < 5,
        )


def overdraft() -> Shown:
    """Make 120 calls at once with a balance of a billionth."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "batchline.toml")
        config.write_text(_PRICED)
        with _service(config=config) as service:
            service.command("orgs", "set-balance", "default", "0.000000001", "--credits", "0")
            Event().wait(6)
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "word " * 200}]}).encode()
            with ThreadPoolExecutor(120) as threads:
                replies = list(
                    threads.map(lambda _: service.call("POST", CHAT, body=body).status, range(120), timeout=100)
                )
            [organization] = json.loads(service.command("orgs", "list", "--json"))
            answered = replies.count(200)
            balance = float(organization["balance"])
            return Shown(
                f"{answered} of 120 are answered; the balance is {balance:g} afterwards",
                bound="the cost of one call, -2",
                holds=answered <= 1 and balance >= -2,
            )


def readyz() -> Shown:
    """Ask 8 times at once for /readyz without a key, and measure uploads beside that."""
    with _service() as service, ThreadPoolExecutor(8) as threads:
        alone = _upload_seconds(service)
        stop = Event()

        def ask() -> int:
            asked = 0
            while not stop.is_set():
                asked += call(service.port, "GET", "/readyz", headers={}).status == 200
            return asked

        asking = [threads.submit(ask) for _ in range(8)]
        beside = _upload_seconds(service)
        stop.set()
        asked = sum(each.result() for each in asking)
        return Shown(
            f"an upload takes {1000 * alone:.0f} ms alone and {1000 * beside:.0f} ms beside {asked} checks",
            bound="10 times as long and 100 ms",
            holds=beside < 10 * alone + 0.1,
        )


def _upload_seconds(service: Service) -> float:
    body = upload_form(chat_lines(["hello"]))
    return median(_seconds(lambda: service.call("POST", "/v1/files", body=body, headers=FORM)) for _ in range(20))


def validation() -> Shown:
    """Create a batch of one line behind 6 large files of another project."""
    with _service() as service, ThreadPoolExecutor(6) as threads:
        large, small = service.new_account("large"), service.account
        lines = chat_lines(f"word {n}" for n in range(20_000))
        files = [_uploaded(service, large, lines) for _ in range(6)]
        own = _uploaded(service, small, chat_lines(["hello"]))
        creating = [threads.submit(_create, service, large, file_id) for file_id in files]
        Event().wait(0.1)
        waited = _seconds(lambda: _create(service, small, own))
        whole = _seconds(lambda: [each.result() for each in creating])
        return Shown(
            f"it waits {waited:.2f} s; the others go on for {whole:.2f} s after it",
            bound="half of the time of all",
            holds=waited < (waited + whole) / 2,
        )


def _uploaded(service: Service, account: Account, lines: bytes) -> str:
    headers = FORM | credentials_of(account)
    file_id: str = call(service.port, "POST", "/v1/files", body=upload_form(lines), headers=headers).json["id"]
    return file_id


def _create(service: Service, account: Account, file_id: str) -> None:
    body = json.dumps({"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}).encode()
    reply = call(service.port, "POST", "/v1/batches", body=body, headers=credentials_of(account))
    assert reply.status == 200, reply
