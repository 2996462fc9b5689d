"""What an upstream can do to a line, what a client can do to a batch, and what becomes of both."""

import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any, NamedTuple

import openai
import pytest

from tests.support.service import (
    CHAT,
    Mock,
    Reply,
    Service,
    await_end,
    chat_lines,
    counts_of,
    results_of,
    running_mock,
    running_service,
    submit,
    wait_until,
)

_ATTEMPTS = 2
_THROTTLES = 3
_RETRY_AFTER_SECONDS = 3
_WINDOW_SECONDS = 6


class Setting(NamedTuple):
    service: Service
    mock: Mock


def run(service: Service, *prompts: str) -> list[Any]:
    """The records of a batch with these prompts, in their order."""
    lines, client = chat_lines(prompts), service.client()
    records = results_of(client, await_end(client, submit(client, lines).id), lines)
    return [records[f"line-{n}"] for n in range(len(prompts))]


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """Little patience of every kind."""
    with (
        running_mock() as mock,
        running_service(
            tmp_path_factory.mktemp("faulty"),
            mock.url,
            max_attempts=_ATTEMPTS,
            max_throttles=_THROTTLES,
            retry_base_seconds=0.01,
            request_timeout_seconds=3,
            max_answer_bytes=100_000,
        ) as service,
    ):
        yield Setting(service, mock)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """Few slots, so that there is something left to cancel."""
    folder = tmp_path_factory.mktemp("plain")
    with running_mock() as mock, running_service(folder, mock.url, max_concurrency=4) as service:
        yield Setting(service, mock)


@pytest.mark.parametrize(
    ("directive", "code", "legacy"),
    [
        ("status=400", "invalid_request_error", "http_400"),
        ("status=422", "invalid_request_error", "http_422"),
        ("status=418", "invalid_request_error", "http_418"),
        ("error=context_length_exceeded", "context_length_exceeded", "http_400"),
        ("status=404", "not_found_error", "http_404"),
        ("status=413", "request_too_large", "http_413"),
        ("status=420", "insufficient_quota", "http_420"),
        ("status=429 error=insufficient_quota", "insufficient_quota", "http_429"),
    ],
)
def test_a_refusal_is_final(faulty: Setting, directive: str, code: str, legacy: str) -> None:
    """D2: asked once, and told in the words of the table, with the upstream's param."""
    asked = faulty.mock.stats()["requests"]
    [record] = run(faulty.service, f"[[{directive}]]")
    assert record["error"]["code"] == code
    assert record["error"]["message"].startswith(f"[legacy:{legacy}] ")
    assert record["error"]["param"] == ("messages" if "error=" in directive else None)
    assert faulty.mock.stats()["requests"] - asked == 1


@pytest.mark.parametrize("status", [401, 403])
def test_a_line_whose_credentials_are_refused_fails_after_its_attempts(faulty: Setting, status: int) -> None:
    """D2, D3: it may be the service's own key that is wrong, and then no line must fail at once."""
    asked = faulty.mock.stats()["requests"]
    [record] = run(faulty.service, f"[[status={status}]]")
    assert record["error"]["code"] == "authentication_error"
    assert record["error"]["message"].startswith(f"[legacy:http_{status}] ")
    assert faulty.mock.stats()["requests"] - asked == _ATTEMPTS


_FAULTS = {
    "status=500": "upstream returned 500",
    "status=503": "upstream returned 503",
    "status=408": "upstream returned 408",
    "status=409": "upstream returned 409",
    "redirect": "upstream returned 307",
    "html": "a body that is not JSON",
    "status=204": "a body that is not JSON",
    "cut": "the connection ended in the middle of the answer",
    "drop": "the connection ended before an answer came",
    "hang": "no complete answer within 3 s",
    "huge=200000": "answer over 100000 bytes",
}


def _run_faults(service: Service, more: str = "") -> dict[str, Any]:
    """The record of a line with each fault. A break beside lines that go on is no crash, after which the upstream
    would be left alone for seconds."""
    beside = [f"[[delay=1]] {n}" for n in range(6)]
    records = run(service, *beside, *(f"[[{directive}{more}]]" for directive in _FAULTS))
    assert not any(record["error"] for record in records[: len(beside)])
    return dict(zip(_FAULTS, records[len(beside) :], strict=True))


@pytest.fixture(scope="module")
def faults(faulty: Setting) -> dict[str, Any]:
    return _run_faults(faulty.service)


@pytest.mark.parametrize(("directive", "reason"), _FAULTS.items())
def test_a_fault_is_tried_again_and_told_in_the_end(faults: dict[str, Any], directive: str, reason: str) -> None:
    """D1, D2: pages, half answers, none at all, redirects and floods; never followed, never taken for an answer."""
    error = faults[directive]["error"]
    assert error["code"] == "internal_error"
    told = re.fullmatch(
        rf"\[legacy:retries_exhausted\] Line failed after (\d+) attempts: .*{reason}.*", error["message"]
    )
    assert told is not None
    attempts = int(told[1])
    # A quick 5xx may be taken for one of an upstream that has too much to do, and is tried more often then.
    assert attempts >= _ATTEMPTS if directive in {"status=500", "status=503"} else attempts == _ATTEMPTS


@pytest.mark.rule("D10", "An upstream that aborts a line sees as many requests as the line has attempts.")
def test_an_upstream_that_aborts_sees_one_request_per_attempt(faulty: Setting) -> None:
    """D10: also on connections that were kept alive, of which the first lines leave more than the others need."""
    beside = [f"[[delay=1]] beside {n}" for n in range(6)]
    run(faulty.service, *(f"[[delay=0.5]] before {n}" for n in range(20)))
    asked = faulty.mock.stats()["requests"]
    run(faulty.service, *beside, "[[drop]] alone")
    assert faulty.mock.stats()["requests"] - asked == len(beside) + _ATTEMPTS


def test_one_broken_connection_is_no_outage(tmp_path: Path) -> None:
    """D3: that takes 16 answers of 4 lines. Until then a line has its attempts, and not one more."""
    with running_mock() as mock, running_service(tmp_path, mock.url, max_attempts=2) as service:
        run(service, "[[cut]] this one breaks by itself")
        client, asked = service.client(), mock.stats()["requests"]
        batch_id = submit(client, chat_lines(["[[status=503]]"])).id

        def is_settled() -> bool:
            assert mock.stats()["requests"] - asked <= 2
            return client.batches.retrieve(batch_id).status == "completed"

        wait_until(is_settled, what="the end of a line that is refused")


def test_a_fault_that_passes_costs_nothing(faulty: Setting) -> None:
    """D3: one attempt fails, the next succeeds, whatever the fault was; the line's id stays the same."""
    for directive, record in _run_faults(faulty.service, " times=1").items():
        assert record["error"] is None, directive
        assert record["response"]["request_id"].endswith("_2")


@pytest.mark.rule("D3", "A 429 spends no attempt but has a budget of its own.")
def test_throttling_spends_no_attempts_but_has_a_budget(faulty: Setting) -> None:
    """D3, D2: more 429 than there are attempts are borne; more than the budget are not."""
    assert _THROTTLES > _ATTEMPTS
    [borne, spent] = run(faulty.service, f"[[status=429 times={_THROTTLES}]]", "[[status=429]]")
    assert borne["error"] is None
    assert spent["error"]["code"] == "rate_limit_exceeded"
    assert spent["error"]["message"].startswith("[legacy:http_429] ")


def test_a_storm_of_429_fails_nothing(tmp_path: Path) -> None:
    """D3: with a single attempt allowed, a hundred lines outlive an upstream that has time for nobody."""
    lines = chat_lines(f"line {n}" for n in range(100))
    with running_mock() as mock, running_service(tmp_path, mock.url, max_attempts=1) as service:
        mock.follow(status={"429": 100})
        client = service.client()
        batch_id = submit(client, lines).id
        service.program.wait_for_log("(upstream unavailable, pausing dispatch)")
        told = service.call("GET", "/metrics").body.decode().splitlines()
        assert 'batchline_upstream_paused{model="",reason="http_429",upstream="default"} 1.0' in told
        asked = mock.stats()["requests"]
        wait_until(lambda: mock.stats()["requests"] > asked, what="a probe")
        mock.follow()
        records = results_of(client, await_end(client, batch_id), lines)
    assert not any(record["error"] for record in records.values())


def test_an_upstream_that_never_comes_is_given_up(tmp_path: Path) -> None:
    """D3, D2: when patience runs out, refused connections count, and the batch completes with its failures."""
    lines = chat_lines(f"line {n}" for n in range(30))
    with socket.socket() as nobody:
        # Bound but not listening: connections are refused, and nobody else can take the port.
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}/v1"
        with running_service(tmp_path, url, upstream_patience_seconds=1, retry_base_seconds=0.01) as service:
            client = service.client()
            batch = await_end(client, submit(client, lines).id)
            assert "upstream still unavailable, resuming attempts" in service.log
            records = results_of(client, batch, lines).values()
    assert (batch.status, counts_of(batch)) == ("completed", (30, 0, 30))
    assert all("connection refused" in record["error"]["message"] for record in records)


@pytest.mark.rule("D3", "A line that was told to wait is not sent again before its time.")
def test_retry_after_is_honoured_and_holds_no_slot(tmp_path: Path) -> None:
    """D3: with one slot, others run while a line waits, and it does not come back before its time."""
    with (
        _own_upstream() as upstream,
        running_service(tmp_path, f"http://127.0.0.1:{upstream.server_port}/v1", max_concurrency=1) as service,
    ):
        assert not any(record["error"] for record in run(service, "429", "503", "other"))
    assert list(upstream.arrivals) == ["429", "503", "other"]
    for status in ("429", "503"):
        first, second = upstream.arrivals[status]
        assert first < upstream.arrivals["other"][0] < second
        assert second - first >= _RETRY_AFTER_SECONDS


class _Upstream(ThreadingHTTPServer):
    """Tells whoever names a status to come back in a second, once."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.arrivals: dict[str, list[float]] = {}

    def answer(self, body: bytes) -> int:
        prompt = json.loads(body)["messages"][0]["content"]
        times = self.arrivals.setdefault(prompt, [])
        times.append(monotonic())
        return int(prompt) if prompt.isdecimal() and len(times) == 1 else 200


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Upstream

    def do_POST(self) -> None:
        status = self.server.answer(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(status)
        self.send_header("content-length", "2")
        if status != 200:
            self.send_header("retry-after", str(_RETRY_AFTER_SECONDS))
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


@contextmanager
def _own_upstream() -> Iterator[_Upstream]:
    with _Upstream() as server:
        serving = Thread(target=server.serve_forever)
        serving.start()
        try:
            yield server
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.rule("C11", "A line waiting for its next attempt ends with its last fault.")
@pytest.mark.rule("C12", "A line that was recorded is not written as a leftover too.")
def test_a_cancelled_batch_starts_nothing_more(plain: Setting) -> None:
    """C10, C11, C12: what was in flight counts, what never ran is told so, what waited ends with its last fault."""
    # Lines so short that a worker which hears of the cancel a little late has started more by then.
    short = (f"[[delay=0.05]] {n}" for n in range(398))
    lines = chat_lines(["[[status=503 retry-after=300]]", "[[status=429 retry-after=300]]", *short])
    client, mock = plain.service.client(), plain.mock
    before = mock.stats()["requests"]
    batch_id = submit(client, lines).id
    wait_until(lambda: mock.stats()["requests"] - before > 20, what="lines under way")
    cancelling = client.batches.cancel(batch_id)
    asked = mock.stats()["requests"] - before
    assert cancelling.status == "cancelling"
    assert client.batches.cancel(batch_id).cancelling_at == cancelling.cancelling_at

    batch = await_end(client, batch_id)
    assert (batch.status, batch.finalizing_at, batch.cancelling_at) == ("cancelled", None, cancelling.cancelling_at)
    assert mock.stats()["requests"] - before == asked
    records = results_of(client, batch, lines)
    assert counts_of(batch) == (400, asked - 2, 402 - asked)
    assert [records[name]["error"]["message"] for name in ("line-0", "line-1")] == [
        "[legacy:retries_exhausted] Line failed after 1 attempts: upstream returned 503",
        "[legacy:http_429] scripted status 429",
    ]
    assert _codes(records, "line-2", "line-399") == [None, "batch_cancelled"]
    assert client.batches.cancel(batch_id) == batch


@pytest.mark.rule("C13", "Lines that never ran end as batch_expired.")
def test_an_expired_batch_keeps_what_it_has(tmp_path: Path) -> None:
    """C11, C13: nothing starts after the window, what is in flight at its end counts, the rest is ``batch_expired``."""
    lines = chat_lines(
        ["quick", "[[status=503 retry-after=300]]", "[[delay=8]] a", "[[delay=8]] b", *(f"never {n}" for n in range(9))]
    )
    with (
        running_mock() as mock,
        running_service(tmp_path, mock.url, max_concurrency=2, completion_window_seconds=_WINDOW_SECONDS) as service,
    ):
        client = service.client()
        created = submit(client, lines)
        assert created.expires_at == created.created_at + _WINDOW_SECONDS
        batch = await_end(client, created.id)
        records = results_of(client, batch, lines)
        assert mock.stats()["requests"] == 4
        with pytest.raises(openai.ConflictError):
            client.batches.cancel(batch.id)
    assert (batch.status, batch.finalizing_at, counts_of(batch)) == ("expired", None, (13, 3, 10))
    assert batch.expired_at is not None
    assert batch.expired_at >= created.created_at + _WINDOW_SECONDS
    assert _codes(records, "line-0", "line-1", "line-2", "line-3") == [None, "internal_error", None, None]
    assert set(_codes(records, *(f"line-{n}" for n in range(4, 13)))) == {"batch_expired"}


@pytest.mark.rule("B9", "Deleting the input of a running batch changes nothing for it.")
def test_an_input_deleted_while_its_batch_runs_is_not_missed(plain: Setting) -> None:
    """B9: also not by a process that has to read the lines again."""
    lines = chat_lines(f"[[delay=0.3]] {n}" for n in range(24))
    client = plain.service.client()
    created = submit(client, lines)
    wait_until(lambda: plain.mock.stats()["in_flight"] > 0, what="lines in flight")
    client.files.delete(created.input_file_id)
    plain.service.kill()
    plain.service.restart()
    client = plain.service.client()
    records = results_of(client, await_end(client, created.id), lines)
    assert not any(record["error"] for record in records.values())
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(created.input_file_id)


def test_an_idempotency_key_gets_its_answer_again(plain: Setting) -> None:
    """A11: byte for byte, at the same time, after the end, after a restart; refusals too; with another body 409."""
    service = plain.service
    before = len(list(service.client().batches.list()))
    files = service.client().files
    good, bad = (files.create(file=lines, purpose="batch").id for lines in (chat_lines(["one"]), b"{"))
    with ThreadPoolExecutor() as clients:
        at_once = list(clients.map(lambda _: _create(service, good, key="good"), range(4)))
    first, refused = at_once[0], _create(service, bad, key="bad")
    assert (first.status, refused.status) == (200, 400)
    assert {reply.body for reply in at_once} == {first.body}
    assert sorted(reply.headers.get("x-batchline-replayed", "") for reply in at_once) == ["", "true", "true", "true"]
    await_end(service.client(), first.json["id"])

    service.restart()
    for earlier, file_id, key in ((first, good, "good"), (refused, bad, "bad")):
        again = _create(service, file_id, key=key)
        assert (again.status, again.body) == (earlier.status, earlier.body)
        assert again.headers["x-batchline-replayed"] == "true"
    other = _create(service, good, key="good", metadata={"other": "body"})
    assert (other.status, other.error["code"]) == (409, "idempotency_key_reused")
    assert other.headers["x-should-retry"] == "false"
    assert len(list(service.client().batches.list())) == before + 2


def test_a_client_that_left_gets_its_batch_when_it_asks_again(plain: Setting) -> None:
    """A11: its SDK sends the create once more; that is the same batch, until an answer was fully sent."""
    service = plain.service
    run(service, "something, so that there is a process to validate")
    file_id = service.client().files.create(file=chat_lines(["one"]), purpose="batch").id
    body, answered = _create_body(file_id), _creates_answered(service)
    with _no_validation(service), service.connect() as connection:
        connection.sendall(service.head("/v1/batches", length=len(body), headers={}) + body)
        wait_until(lambda: bool(_validating(service)), what="the create under way")
        connection.close()
        [batch_id] = _validating(service)
    wait_until(lambda: _creates_answered(service) > answered, what="the end of the create nobody waits for")
    again = _create(service, file_id, retry=1)
    assert (again.status, again.headers["x-batchline-replayed"]) == (200, "true")
    assert again.json["id"] == batch_id

    def is_new() -> bool:
        return _create(service, file_id, retry=1).headers["x-batchline-replayed"] is None

    wait_until(is_new, what="a batch of its own")
    assert _create(service, file_id, retry=0).headers["x-batchline-replayed"] is None
    # Another test counts the requests of the upstream that they share.
    for batch in service.client().batches.list():
        await_end(service.client(), batch.id)


@contextmanager
def _no_validation(service: Service) -> Iterator[None]:
    """Whatever the service validates waits, because the processes that would do it stand still."""
    children = [member for member in service.program.family() if member.pid != service.pid]
    for child in children:
        child.suspend()
    try:
        yield
    finally:
        for child in children:
            child.resume()


def _creates_answered(service: Service) -> int:
    return service.log.count("method=POST path=/v1/batches ")


def _validating(service: Service) -> list[str]:
    return [batch.id for batch in service.client().batches.list() if batch.status == "validating"]


def _codes(records: dict[str, Any], *names: str) -> list[str | None]:
    return [records[name]["error"] and records[name]["error"]["code"] for name in names]


def _create_body(file_id: str, metadata: dict[str, str] | None = None) -> bytes:
    return json.dumps({"input_file_id": file_id, "endpoint": CHAT, "metadata": metadata}).encode()


def _create(
    service: Service, file_id: str, *, key: str = "", retry: int = 0, metadata: dict[str, str] | None = None
) -> Reply:
    headers = {"idempotency-key": key, "x-stainless-retry-count": str(retry)}
    return service.call("POST", "/v1/batches", body=_create_body(file_id, metadata), headers=headers)
