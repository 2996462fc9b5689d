"""The connection below the requests: A5, A6, A14, and HTTP that is none."""

import socket
from collections.abc import Callable

import pytest

from batchline.domain.limits import MAX_HEADER_BYTES, MAX_HEADERS
from tests.support.api_server import FORM, LINE, Api, Held, field, file_part, form, read_reply, read_to_end

HEALTH = b"GET /healthz HTTP/1.1\r\nhost: test\r\n\r\n"


def refused(sock: socket.socket, status: int) -> None:
    """Answered in the envelope with a request id, and then closed."""
    reply = read_reply(sock)
    assert reply.status == status
    assert reply.error["type"] == "invalid_request_error"
    assert reply.headers["x-request-id"].startswith("req_")
    assert reply.headers["connection"] == "close"
    assert read_to_end(sock) == b""


@pytest.mark.rule("A5", "Answers that are given below the routes carry one too.")
@pytest.mark.rule("A14", "Headers that do not come in time are 408.")
@pytest.mark.parametrize("start", [b"", b"GET /healthz HTT", b"GET /healthz HTTP/1.1\r\nhost: te", b"\r\n"])
def test_headers_that_do_not_end_are_408(shared: Callable[..., Api], start: bytes) -> None:
    """A14"""
    api = shared(header_timeout_seconds=0.5)
    with api.connect() as sock:
        sock.sendall(start)
        refused(sock, 408)


@pytest.mark.parametrize("start", [b"G", b"GET /healthz HTTP/1.1\r\n", b"\r\n"])
def test_the_deadline_holds_for_later_requests_of_a_connection(shared: Callable[..., Api], start: bytes) -> None:
    """A14"""
    api = shared(header_timeout_seconds=0.5)
    with api.connect() as sock:
        for _ in range(2):
            sock.sendall(HEALTH)
            assert read_reply(sock).status == 200
        sock.sendall(start)
        refused(sock, 408)


def test_a_connection_between_requests_is_not_late(shared: Callable[..., Api]) -> None:
    """A14: keep-alive outlasts the deadline for headers."""
    api = shared(header_timeout_seconds=0.5)
    with api.connect() as kept, api.connect() as late:
        kept.sendall(HEALTH)
        assert read_reply(kept).status == 200
        refused(late, 408)
        kept.sendall(HEALTH)
        assert read_reply(kept).status == 200


def test_headers_that_wait_for_an_earlier_answer_do_not_spoil_it(serve: Callable[..., Api]) -> None:
    """A14: no refusal is written into the middle of another answer."""
    held: list[Held] = []

    def hold(validator: object) -> Held:
        held.append(Held(validator))
        return held[0]

    api = serve(header_timeout_seconds=0.5, wrap_validator=hold)
    file_id = api.upload().json["id"]
    body = b'{"input_file_id":"%s","endpoint":"/v1/chat/completions"}' % file_id.encode()
    with api.connect() as sock, api.connect() as late:
        sock.sendall(api.head("POST /v1/batches", f"content-length: {len(body)}") + body + b"GET /hea")
        refused(late, 408)
        api.await_(held[0].drop())
        assert read_reply(sock).json["status"] == "in_progress"
        refused(sock, 408)


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"NONSENSE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /healthz HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nnul: \x00\r\n\r\n",
        b"GET /caf\xe9 HTTP/1.1\r\nhost: test\r\n\r\n",
        b"POST /v1/batches HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc",
        b"POST /v1/batches HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\nabc",
        b"CONNECT other:443 HTTP/1.1\r\nhost: other\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nhost: one\r\nhost: two\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        b"GET /healthz\r\n\r\n",
        b"GET /healthz HTTP/0.9\r\n\r\n",
        b"GET /healthz HTTP/2.0\r\nhost: test\r\n\r\n",
    ],
)
def test_what_is_no_http_is_answered_in_the_envelope(api: Api, request_bytes: bytes) -> None:
    """A5, A6"""
    with api.connect() as sock:
        sock.sendall(request_bytes)
        refused(sock, 400)


@pytest.mark.rule("A14", "Only a request of HTTP/1.1 needs a Host header.")
def test_a_request_of_the_older_version_needs_no_host(api: Api) -> None:
    with api.connect() as sock:
        sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert read_reply(sock).status == 200


def test_garbage_after_a_good_request_does_not_take_its_answer(api: Api) -> None:
    """A6"""
    with api.connect() as sock:
        sock.sendall(HEALTH + b"NONSENSE\r\n\r\n")
        assert read_reply(sock).status == 200
        read_to_end(sock)


def test_pipelined_requests_are_answered_in_order(api: Api) -> None:
    with api.connect() as sock:
        sock.sendall(HEALTH + b"GET /nowhere HTTP/1.1\r\nhost: test\r\n\r\n" + HEALTH)
        received = b""
        while received.count(b"HTTP/1.1 ") < 3:
            received += sock.recv(65536)
        assert [line[:3] for line in received.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"200"]


@pytest.mark.parametrize(
    "headers",
    [
        b"long: " + b"y" * 1_000_000,
        b"n: v\r\n" * 100_000 + b"\r\n",
        b"fits: " + b"y" * MAX_HEADER_BYTES + b"\r\n\r\n",
        b"n: v\r\n" * MAX_HEADERS + b"\r\n",
    ],
    ids=["one", "many", "just over", "too many"],
)
def test_headers_without_measure_are_431_and_the_client_sees_it(api: Api, headers: bytes) -> None:
    """A6, A14"""
    with api.connect() as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nhost: test\r\n" + headers)
        refused(sock, 431)


@pytest.mark.rule("A14", "A URL over 8 KiB is 414.")
@pytest.mark.parametrize("url", [b"/" + b"%41" * 3000, b"/v1/files?" + b"a&" * 5000], ids=["path", "query"])
def test_a_url_without_measure_is_414(api: Api, url: bytes) -> None:
    with api.connect() as sock:
        sock.sendall(b"GET " + url + b" HTTP/1.1\r\nhost: test\r\n\r\n")
        refused(sock, 414)


def test_large_headers_within_measure_are_fine(api: Api) -> None:
    reply = api.call("GET", "/healthz", headers={"large": "y" * (MAX_HEADER_BYTES - 1000)})
    assert reply.status == 200


def test_a_large_body_beside_small_headers_is_not_taken_for_headers(api: Api) -> None:
    """B1"""
    assert api.upload(b"x" * (4 * MAX_HEADER_BYTES)).status == 200


def test_trailers_are_no_headers(api: Api) -> None:
    """A1: what comes after the body cannot authenticate it."""
    with api.connect() as sock:
        sock.sendall(
            b"POST /v1/batches HTTP/1.1\r\nhost: test\r\n"
            b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
            + "".join(f"{name}: {value}\r\n" for name, value in api.account.headers.items()).encode()
            + b"\r\n"
        )
        assert read_reply(sock).status == 401


@pytest.mark.parametrize("trailers", [b"t: " + b"y" * 1_000_000, b"t: v\r\n" * 100_000], ids=["one", "many"])
def test_trailers_without_measure_end_the_request(api: Api, trailers: bytes) -> None:
    """A14, B2"""
    with api.connect() as sock:
        sock.sendall(
            api.head("POST /v1/files", f"content-type: {FORM['content-type']}", "transfer-encoding: chunked")
            + b"0\r\n"
            + trailers
        )
        reply = read_reply(sock)
        assert reply.error["code"] == "invalid_multipart"
        read_to_end(sock)


def test_an_offer_to_upgrade_is_ignored(api: Api) -> None:
    offer = b"GET /healthz HTTP/1.1\r\nhost: test\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n\r\n"
    with api.connect() as sock:
        for _ in range(2):
            sock.sendall(offer)
            assert read_reply(sock).status == 200


def test_an_offer_to_upgrade_with_a_body_is_refused_rather_than_read_without_it(api: Api) -> None:
    with api.connect() as sock:
        sock.sendall(api.head("POST /v1/batches", "connection: Upgrade", "upgrade: h2c", "content-length: 2") + b"{}")
        refused(sock, 400)


def test_a_client_that_stops_sending_in_its_body_hears_what_is_wrong(api: Api) -> None:
    """B2: an upload that is cut off is 400 invalid_multipart if the client still reads."""
    start = form(field("purpose", "batch"), file_part(LINE))[:-10]
    with api.connect() as sock:
        sock.sendall(
            api.head("POST /v1/files", f"content-type: {FORM['content-type']}", "content-length: 5000") + start
        )
        sock.shutdown(socket.SHUT_WR)
        reply = read_reply(sock)
        assert reply.status == 400
        assert reply.error["code"] == "invalid_multipart"
        assert read_to_end(sock) == b""


def test_a_body_whose_chunks_are_malformed_is_taken_as_cut_off(api: Api) -> None:
    """B2"""
    start = form(field("purpose", "batch"), file_part(LINE))[:-10]
    with api.connect() as sock:
        sock.sendall(
            api.head("POST /v1/files", f"content-type: {FORM['content-type']}", "transfer-encoding: chunked")
            + b"%x\r\n%s\r\nZZ\r\n" % (len(start), start)
        )
        reply = read_reply(sock)
        assert reply.status == 400
        assert reply.error["code"] == "invalid_multipart"
        assert read_to_end(sock) == b""
