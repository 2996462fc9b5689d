"""Why lines of a batch wait, as the service says over HTTP while it runs (D11)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from time import monotonic
from typing import Any

import pytest
from openai import OpenAI

from tests.support.service import Mock, Service, chat_lines, running_mock, running_service, submit, wait_until

_SLOTS = 2
_RATE = 5.0


@pytest.fixture(scope="module")
def mock() -> Iterator[Mock]:
    with running_mock() as mock:
        yield mock


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, mock: Mock) -> Iterator[Service]:
    with running_service(tmp_path_factory.mktemp("waiting"), mock.url, max_concurrency=_SLOTS) as service:
        yield service


@contextmanager
def _rate_limited_upstream() -> Iterator[str]:
    """Run an upstream that answers 429 to what comes faster than ``_RATE``, and yield its URL."""
    lock, next_at = Lock(), [monotonic()]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            with lock:
                accepted = monotonic() >= next_at[0]
                if accepted:
                    next_at[0] = max(next_at[0], monotonic() - 1) + 1 / _RATE
            body = b'{"choices":[]}' if accepted else b'{"error":{"message":"slow down"}}'
            self.send_response(200 if accepted else 429)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _progress(client: OpenAI, batch_id: str) -> Any:
    return client.get(f"/batches/{batch_id}/progress", cast_to=object)


def _await(client: OpenAI, batch_id: str, reason: str, met: Callable[[dict[str, Any]], bool] = bool) -> dict[str, Any]:
    """Wait until lines of a batch wait for a reason and a condition is met, and return the progress."""
    found: list[dict[str, Any]] = []

    def is_met() -> bool:
        progress = _progress(client, batch_id)
        wait = progress["waiting_for"]
        if wait is not None and wait["reason"] == reason and met(wait):
            found.append(progress)
        return bool(found)

    wait_until(is_met, what=f"the reason {reason}")
    return found[0]


@pytest.mark.rule("D11", "The progress names the rate at which the upstream accepts lines.")
def test_lines_wait_for_a_rate(tmp_path: Path) -> None:
    with _rate_limited_upstream() as url, running_service(tmp_path, url) as service:
        client = service.client()
        batch = submit(client, chat_lines(f"line {n}" for n in range(500)))
        wait = _await(client, batch.id, "rate_limit", lambda wait: 1 < (wait["rate"] or 0) < 4 * _RATE)["waiting_for"]
        assert wait.keys() == {"reason", "upstream", "model", "rate"}
        assert (wait["upstream"], wait["model"]) == ("default", "m")
        client.batches.cancel(batch.id)


@pytest.mark.rule("D11", "The progress says how many slots other projects have taken.")
def test_lines_wait_for_slots(service: Service, mock: Mock) -> None:
    mock.follow()
    client, other = service.client(), service.client(service.new_account("other"))
    first = submit(client, chat_lines(f"[[delay=1]] first {n}" for n in range(100)))
    second = submit(other, chat_lines(f"[[delay=1]] second {n}" for n in range(100)))
    for asking, batch in ((client, first), (other, second)):
        wait = _await(asking, batch.id, "slots", lambda wait: wait["by_other_projects"] == 1)["waiting_for"]
        assert wait == {
            "reason": "slots",
            "upstream": "default",
            "in_flight": _SLOTS,
            "limit": _SLOTS,
            "by_other_projects": 1,
            "sync_calls": 0,
        }
    for asking, batch in ((client, first), (other, second)):
        asking.batches.cancel(batch.id)
    wait_until(lambda: bool(mock.stats()["in_flight"] == 0), what="the end of the lines in flight")


@pytest.mark.rule("D11", "The progress says that an upstream does not accept the credentials, and estimates no end.")
def test_lines_wait_for_a_paused_upstream(service: Service, mock: Mock) -> None:
    mock.follow()
    client = service.client()
    batch = submit(client, chat_lines(f"[[delay=0.01]] {n}" for n in range(1000)))
    wait_until(lambda: _progress(client, batch.id)["eta"] is not None, what="the first lines")
    mock.follow(status={401: 100})
    later = submit(client, chat_lines(f"later {n}" for n in range(100)))
    progress = _await(client, later.id, "upstream_paused")
    wait = progress["waiting_for"]
    assert wait.keys() == {"reason", "upstream", "detail", "since", "model"}
    assert (wait["upstream"], wait["detail"]) == ("default", "http_401")
    assert progress["eta"] is None
    mock.follow()
    for each in (batch, later):
        client.batches.cancel(each.id)
