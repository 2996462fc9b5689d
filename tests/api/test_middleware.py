"""Rules for every request on every route: A5, A6, A10, A14."""

import gc
import logging
from collections.abc import Callable
from types import FrameType

import pytest

from batchline.domain.errors import ApiError, BadGateway, GatewayTimeout, ObjectsDown, StoreDown, Unavailable
from tests.support.api_server import FORM, LINE, Api, Faulty, Held, form, read_reply, read_to_end

ANY_REQUEST = [
    ("GET", "/healthz", 200),
    ("GET", "/v1/files", 200),
    ("HEAD", "/v1/files", 200),
    ("OPTIONS", "/v1/files", 204),
    ("GET", "/v1/files/file-none", 404),
    ("GET", "/v1/batches/", 400),
    ("GET", "/nowhere", 404),
    ("PUT", "/v1/files", 405),
]


@pytest.mark.rule("A5", "Every answer carries an x-request-id of its own.")
@pytest.mark.parametrize(("method", "path", "status"), ANY_REQUEST)
def test_every_answer_has_a_new_request_id(api: Api, method: str, path: str, status: int) -> None:
    """A5"""
    replies = [api.call(method, path) for _ in range(2)]
    assert [reply.status for reply in replies] == [status] * 2
    first, second = (reply.headers["x-request-id"] for reply in replies)
    assert first.startswith("req_")
    assert len(first) > len("req_") + 16
    assert first != second


@pytest.mark.rule("A6", "Unknown routes and wrong methods are told in the envelope too.")
def test_unknown_routes_are_answered_in_the_envelope(api: Api) -> None:
    """A6"""
    reply = api.call("GET", "/v1/nothing", anonymous=True)
    assert reply.status == 404
    assert reply.error["type"] == "invalid_request_error"
    assert reply.headers["content-type"] == "application/json"


ALLOWED = [
    ("/v1/files", "GET, HEAD, OPTIONS, POST"),
    ("/v1/files/file-x", "DELETE, GET, HEAD, OPTIONS"),
    ("/v1/files/file-x/content", "GET, HEAD, OPTIONS"),
    ("/v1/batches", "GET, HEAD, OPTIONS, POST"),
    ("/v1/batches/batch_x/cancel", "OPTIONS, POST"),
    ("/healthz", "GET, HEAD, OPTIONS"),
]


@pytest.mark.parametrize(("path", "allow"), ALLOWED)
def test_wrong_methods_are_told_the_right_ones(api: Api, path: str, allow: str) -> None:
    """A6"""
    reply = api.call("PATCH", path)
    assert reply.status == 405
    assert reply.headers["allow"] == allow
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("path", "allow"), ALLOWED)
def test_options_names_the_methods_of_the_route(api: Api, path: str, allow: str) -> None:
    """A6, A7"""
    reply = api.call("OPTIONS", path, anonymous=True)
    assert reply.status == 204
    assert reply.headers["allow"] == reply.headers["access-control-allow-methods"] == allow


def test_options_on_an_unknown_route_is_404(api: Api) -> None:
    """A6"""
    reply = api.call("OPTIONS", "/v1/nothing", anonymous=True)
    assert reply.status == 404
    assert "allow" not in reply.headers


@pytest.mark.rule("A12", "Routes take no trailing slash and redirect nothing.")
@pytest.mark.parametrize("path", ["/v1/files/file-x/", "/v1/batches/batch_x/", "/healthz/", "/v1/batches/x/cancel/"])
def test_a_trailing_slash_is_another_route_and_redirects_nowhere(api: Api, path: str) -> None:
    """A12"""
    reply = api.call("GET", path)
    assert reply.status == 404
    assert "location" not in reply.headers


@pytest.mark.rule("A6", "A fault of ours is 500 and shows no internals.")
def test_a_fault_of_ours_shows_no_internals_and_logs_no_contents(
    serve: Callable[..., Api], caplog: pytest.LogCaptureFixture
) -> None:
    """A6"""
    caplog.set_level(logging.INFO)
    api = serve(wrap_store=lambda store: Faulty(store, owner_of=ValueError("salaries.jsonl")))
    reply = api.call("GET", "/v1/files")
    assert reply.status == 500
    assert reply.error == {"message": "Internal server error", "type": "internal_error", "code": None, "param": None}
    api.run_pending()
    (logged,) = (record for record in caplog.records if record.levelname == "ERROR")
    assert logged.__dict__["request_id"] == reply.headers["x-request-id"]
    assert "ValueError" in logged.__dict__["error"]
    assert "salaries" not in str([record.__dict__ for record in caplog.records])


@pytest.mark.rule("A10", "An outage says when to come again.")
@pytest.mark.parametrize("fault", [StoreDown("disk I/O error"), ObjectsDown("no route to host")])
def test_storage_that_is_down_is_503_and_asks_to_come_again(
    serve: Callable[..., Api], fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """A6, A10"""
    api = serve(wrap_store=lambda store: Faulty(store, owner_of=fault))
    reply = api.call("GET", "/v1/files")
    assert reply.status == 503
    assert reply.error["type"] == "internal_error"
    assert reply.headers["retry-after"] == "2"
    assert str(fault) not in reply.error["message"]
    api.run_pending()
    assert str(fault) in str([record.__dict__ for record in caplog.records])


@pytest.mark.parametrize("error", [BadGateway("no answer"), GatewayTimeout("no answer"), Unavailable("no answer")])
def test_a_failed_upstream_is_logged_with_its_reason_and_no_trace(
    serve: Callable[..., Api], error: ApiError, caplog: pytest.LogCaptureFixture
) -> None:
    """A6: while an upstream is down, each request would add a trace that says nothing."""
    api = serve(wrap_store=lambda store: Faulty(store, owner_of=error))
    assert api.call("GET", "/v1/models").status == error.status
    api.run_pending()
    (logged,) = (vars(record) for record in caplog.records if record.message.startswith("request failed"))
    assert (logged["error"], logged["reason"]) == (type(error).__name__, "no answer")
    assert "trace" not in logged


def test_the_access_line_names_the_request_but_no_query_and_no_key(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    """A5"""
    caplog.set_level(logging.INFO)
    reply = api.call("GET", "/v1/files?limit=3&token=hunter2")
    api.run_pending()
    lines = [record.__dict__ for record in caplog.records if record.message == "request"]
    (line,) = (line for line in lines if line["request_id"] == reply.headers["x-request-id"])
    assert {name: line[name] for name in ("method", "path", "status", "project_id")} == {
        "method": "GET",
        "path": "/v1/files",
        "status": 200,
        "project_id": api.account.project_id,
    }
    assert line["ms"] >= 0
    assert "hunter2" not in str(line)
    assert api.account.key not in str(line)


def test_a_body_that_stalls_is_408_and_leaves_nothing(serve: Callable[..., Api]) -> None:
    """A14, B2"""
    api = serve(body_timeout_seconds=0.1)
    body = form(b'content-disposition: form-data; name="file"\r\n\r\n' + LINE)
    with api.connect() as sock:
        sock.sendall(api.head("POST /v1/files", f"content-type: {FORM['content-type']}", "content-length: 1000") + body)
        reply = read_reply(sock)
        assert reply.status == 408
        assert reply.error["code"] == "request_timeout"
        assert reply.headers["connection"] == "close"
        assert reply.headers["x-request-id"]
        assert read_to_end(sock) == b""
    assert api.uploading() == 0
    assert api.stored() == []


def test_a_slow_answer_is_no_stalled_body(serve: Callable[..., Api]) -> None:
    """A14: the deadline is the client's; a request whose body is over may wait for its answer."""
    held: list[Held] = []

    def hold(validator: object) -> Held:
        held.append(Held(validator))
        return held[0]

    api = serve(body_timeout_seconds=0.5, header_timeout_seconds=1, wrap_validator=hold)
    file_id = api.upload().json["id"]
    body = b'{"input_file_id":"%s","endpoint":"/v1/chat/completions"}' % file_id.encode()
    with api.connect() as waiting, api.connect() as late:
        waiting.sendall(api.head("POST /v1/batches", f"content-length: {len(body)}") + body)
        assert read_reply(late).status == 408
        api.await_(held[0].drop())
        assert read_reply(waiting).status == 200


@pytest.mark.rule("B2", "A refusal is seen by clients, not a reset connection.")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (("x-api-key: wrong", FORM["content-type"]), 403),
        (("x-api-key: ", FORM["content-type"]), 401),
        ((None, "text/plain"), 400),
        ((None, FORM["content-type"]), 413),
    ],
)
def test_a_refusal_is_seen_by_a_client_that_sends_all_before_it_reads(
    shared: Callable[..., Api], headers: tuple[str | None, str], status: int
) -> None:
    """A6, B2: the connection is not reset while the client sends a body that is not read."""
    api = shared(max_file_bytes=1000)
    body = b"x" * 2_000_000
    key = headers[0] or f"x-api-key: {api.account.key}"
    head = "\r\n".join(
        [
            "POST /v1/files HTTP/1.1",
            "host: test",
            key,
            f"x-project-id: {api.account.project_id}",
            f"content-type: {headers[1]}",
            f"content-length: {len(body)}",
            "",
            "",
        ]
    )
    with api.connect() as sock:
        sock.sendall(head.encode() + body)
        reply = read_reply(sock)
        assert reply.status == status
        assert reply.error["message"]
        assert reply.headers["connection"] == "close"
        assert read_to_end(sock) == b""


def test_what_follows_a_refusal_is_discarded_only_up_to_a_bound(shared: Callable[..., Api]) -> None:
    """B2: a refused client cannot send for ever, however fast it is."""
    api = shared(max_file_bytes=1000, body_timeout_seconds=600)
    chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"

    def send_much() -> None:
        for _ in range(100):
            sock.sendall(chunk)

    with api.connect() as sock:
        sock.sendall(api.head("POST /v1/files", "content-type: text/plain", "transfer-encoding: chunked"))
        with pytest.raises(ConnectionError):
            send_much()


def test_a_refused_client_that_sends_nothing_more_is_let_go(shared: Callable[..., Api]) -> None:
    """A14"""
    api = shared(body_timeout_seconds=0.1)
    with api.connect() as sock:
        sock.sendall(api.head("POST /v1/files", "content-type: text/plain", "content-length: 5000"))
        assert read_reply(sock).status == 400
        assert read_to_end(sock) == b""


def test_a_client_that_asks_before_it_sends_is_refused_without_its_body(api: Api) -> None:
    """A1: no 100 Continue for a body that is not needed, and no waiting for it."""
    with api.connect() as sock:
        sock.sendall(b"POST /v1/files HTTP/1.1\r\nhost: test\r\nexpect: 100-continue\r\ncontent-length: 5000\r\n\r\n")
        assert read_to_end(sock).startswith(b"HTTP/1.1 401 ")


def test_a_client_that_asks_before_it_sends_is_told_to_go_on(api: Api) -> None:
    """B1"""
    body = form(
        b'content-disposition: form-data; name="purpose"\r\n\r\nbatch',
        b'content-disposition: form-data; name="file"\r\n\r\n' + LINE,
    )
    head = api.head(
        "POST /v1/files",
        f"content-type: {FORM['content-type']}",
        f"content-length: {len(body)}",
        "expect: 100-continue",
    )
    with api.connect() as sock:
        sock.sendall(head)
        assert sock.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert read_reply(sock).status == 200


def test_a_body_nobody_asked_for_does_no_harm(api: Api) -> None:
    """A14: an answer given before the body came ends the connection, so that nothing can dangle on it."""
    with api.connect() as sock:
        sock.sendall(api.head("GET /v1/files", "content-length: 4") + b"what")
        reply = read_reply(sock)
        assert reply.status == 200
        assert reply.headers["connection"] == "close"
        assert read_to_end(sock) == b""


def test_the_server_does_not_say_what_it_is_made_of(api: Api) -> None:
    assert "server" not in api.call("GET", "/healthz").headers


@pytest.mark.parametrize(
    ("method", "path", "level"),
    [
        ("GET", "/healthz", logging.DEBUG),
        ("GET", "/metrics", logging.DEBUG),
        ("GET", "/v1/batches", logging.DEBUG),
        ("GET", "/v1/batches/batch_none", logging.DEBUG),
        ("GET", "/v1/batches/batch_none/results", logging.DEBUG),
        ("POST", "/v1/batches/batch_none/cancel", logging.INFO),
        ("GET", "/v1/files", logging.INFO),
        ("POST", "/v1/batches", logging.INFO),
    ],
)
def test_polls_probes_and_scrapes_are_logged_below_info_also_if_the_batch_is_gone(
    api: Api, caplog: pytest.LogCaptureFixture, method: str, path: str, level: int
) -> None:
    caplog.set_level(logging.DEBUG)
    api.call(method, path)
    api.run_pending()
    [record] = [record for record in caplog.records if record.message == "request"]
    assert record.levelno == level


@pytest.mark.parametrize(
    ("path", "level"),
    [
        ("/console/batches", logging.DEBUG),
        ("/console/batches/batch_none/events", logging.DEBUG),
        ("/console/admin", logging.DEBUG),
        ("/console/admin/upstreams", logging.DEBUG),
        ("/console/usage", logging.INFO),
    ],
)
def test_what_an_open_page_of_the_console_reads_is_logged_below_info(
    serve: Callable[..., Api], caplog: pytest.LogCaptureFixture, path: str, level: int
) -> None:
    caplog.set_level(logging.DEBUG)
    api = serve(has_console=True)
    api.call("GET", path)
    api.run_pending()
    [record] = [record for record in caplog.records if record.message == "request"]
    assert record.levelno == level


def test_a_poll_that_fails_here_is_logged_and_a_probe_is_not(
    serve: Callable[..., Api], caplog: pytest.LogCaptureFixture
) -> None:
    """The change of readiness is logged once, when it happens."""
    caplog.set_level(logging.INFO)
    api = serve(wrap_store=lambda store: Faulty(store, owner_of=StoreDown("down"), check=StoreDown("down")))
    assert [api.call("GET", path).status for path in ("/v1/batches", "/readyz")] == [503, 503]
    api.run_pending()
    assert [vars(record)["path"] for record in caplog.records if record.message == "request"] == ["/v1/batches"]
    assert [record for record in caplog.records if record.message == "request failed"] == []


REFUSED = [
    ("/v1/chat/completions", b'{"model":"mock","messages":[],"background":true}', 400),
    ("/v1/chat/completions", b'{"model":"mock","messages":[', 400),
    ("/v1/batches", b"[]", 400),
    ("/v1/files", b"no form", 400),
    ("/v1/batches/batch_x/cancel", b"{}", 404),
]


@pytest.mark.parametrize(("path", "body", "status"), REFUSED)
def test_what_a_refused_client_sent_is_not_held_until_a_garbage_collection(
    api: Api, path: str, body: bytes, status: int
) -> None:
    """D10: an exception and a call that refer to each other would hold all bodies in its traceback."""
    gc.collect()
    gc.disable()
    try:
        reply = api.call("POST", path, body=body, headers={"content-type": "application/json"})
        api.run_pending()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        calls = [found.f_code for found in gc.garbage if isinstance(found, FrameType)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert reply.status == status
    assert [call.co_qualname for call in calls if "batchline" in call.co_filename] == []
