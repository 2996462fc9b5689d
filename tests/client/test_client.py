"""The client of `batchline run` against answers of every kind (F4)."""

import socket
from io import BytesIO
from pathlib import Path
from threading import Thread

import pytest

from batchline.client.client import Client
from batchline.client.errors import (
    BrokenOff,
    ClientError,
    Denied,
    InputChanged,
    OutOfFunds,
    RequestRefused,
    Throttled,
    Trouble,
    Unreachable,
)
from batchline.client.form import UploadForm
from batchline.client.http import Http
from tests.support.scripted_server import ScriptedServer, answering, reply

_BATCH = b'{"id": "batch_1", "status": "in_progress", "request_counts": {"total": 3, "completed": 1, "failed": 1}}'


def _client(url: str) -> Client:
    return Client(Http(locate=lambda: url, headers={"x-api-key": "k", "x-project-id": "p"}))


def _refused(answer: bytes) -> ClientError:
    with answering(answer) as server, pytest.raises(ClientError) as refused:
        _client(server.url).batch("batch_1")
    return refused.value


def _error(code: str) -> bytes:
    return b'{"error": {"message": "in words", "type": "t", "param": null, "code": "%s"}}' % code.encode()


def _no_news(_: int) -> None:
    pass


def _nothing(_: int, __: int) -> None:
    pass


def test_an_upload_is_a_form_with_the_purpose_and_the_bytes_of_the_file(tmp_path: Path) -> None:
    """B1, and a file's name can neither end its field nor begin another."""
    path = tmp_path / 'a"b\n.jsonl'
    path.write_bytes(b"x" * 600_000 + b"\r\n--edge--")
    sent: list[int] = []
    with answering(reply(200, b'{"id": "file-1"}')) as server:
        assert _client(server.url).upload(path, boundary="edge-1", sent=sent.append) == "file-1"
    [asked] = server.asked
    assert asked.head.startswith("POST /v1/files HTTP/1.1")
    assert (asked.header("x-api-key"), asked.header("x-project-id")) == ("k", "p")
    assert b'name="purpose"\r\n\r\nbatch\r\n' in asked.body
    assert b'filename="a%22b%0A.jsonl"' in asked.body
    assert b"\r\n\r\n" + path.read_bytes() + b"\r\n--edge-1--\r\n" in asked.body
    assert sent == sorted(sent)
    assert sent[-1] == path.stat().st_size


def test_an_upload_is_read_piece_by_piece(tmp_path: Path) -> None:
    """F4: the file is never held in memory whole."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 3_000_000)
    assert max(map(len, UploadForm(path, boundary="b", sent=_no_news))) <= 256 * 1024


def test_a_refusal_while_the_upload_is_still_being_sent_is_heard(tmp_path: Path) -> None:
    """B2: 413 comes before the whole file is there; it is an answer, not a broken connection."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 50_000_000)
    listener = socket.create_server(("127.0.0.1", 0))

    def refuse() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(reply(413, _error("file_too_large"), connection="close"))
            connection.shutdown(socket.SHUT_WR)
            # As the service does: what is still on its way is read, so that the answer is not lost to a reset.
            for _ in range(200):
                if not connection.recv(65536):
                    break

    thread = Thread(target=refuse, daemon=True)
    thread.start()
    with listener, pytest.raises(RequestRefused) as refused:
        _client(f"http://127.0.0.1:{listener.getsockname()[1]}").upload(path, boundary="b", sent=_no_news)
    thread.join(60)
    assert (refused.value.status, refused.value.code) == (413, "file_too_large")


def test_a_file_that_shrinks_while_it_is_sent_is_no_failure_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 1000)
    form = UploadForm(path, boundary="b", sent=_no_news)
    path.write_bytes(b"x" * 10)
    with pytest.raises(InputChanged, match="shorter"):
        list(form)
    path.unlink()
    with pytest.raises(InputChanged, match="cannot be read"):
        list(form)


def test_a_create_carries_its_idempotency_key() -> None:
    """A11: what makes a repeated create the same create."""
    with answering(reply(200, _BATCH)) as server:
        batch = _client(server.url).create("file-1", endpoint="/v1/e", idempotency_key="run-7")
    assert (batch.id, batch.request_counts.done, batch.is_over) == ("batch_1", 2, False)
    assert server.asked[0].header("idempotency-key") == "run-7"
    assert b'"endpoint":"/v1/e"' in server.asked[0].body


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_request_error", RequestRefused),
        (401, "x", Denied),
        (403, "x", Denied),
        (404, "batch_not_found", RequestRefused),
        (408, "request_timeout", Trouble),
        (429, "insufficient_quota", OutOfFunds),
        (429, "rate_limit_exceeded", Throttled),
        (500, "internal_error", Trouble),
        (503, "service_unavailable", Trouble),
    ],
)
def test_a_refusal_is_of_the_kind_its_status_and_code_say(status: int, code: str, kind: type[RequestRefused]) -> None:
    """A1 to A4, A10: which of them are worth another try depends on it."""
    refused = _refused(reply(status, _error(code), retry_after="7", x_batch_id="batch_9"))
    assert type(refused) is kind
    assert isinstance(refused, RequestRefused)
    assert (str(refused), refused.status, refused.retry_after) == ("in words", status, 7.0)
    assert refused.batch_id == "batch_9"


def test_an_answer_without_an_envelope_is_told_by_its_status() -> None:
    """What stands between a client and the service speaks HTML."""
    assert str(_refused(reply(502, b"<html>"))) == "the server answered 502 Word"
    assert "on to https://other/v1" in str(_refused(reply(301, b"", location="https://other/v1")))
    assert "is the URL right?" in str(_refused(reply(200, b"<html>a page</html>")))


def test_nobody_there_is_told_from_a_connection_that_breaks() -> None:
    """F4: the first may be a wrong URL, the second is worth another try."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(Unreachable):
        _client(url).batch("batch_1")
    with pytest.raises(Unreachable):
        _client("http://no-such-host.invalid").batch("batch_1")
    assert type(_refused(b"")) is BrokenOff
    assert type(_refused(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")) is BrokenOff


def _fetch(server: ScriptedServer, into: BytesIO) -> None:
    _client(server.url).fetch("file-1", into, got=_nothing)


def test_a_download_that_broke_off_goes_on_where_it_was() -> None:
    """B7, F4."""
    cut = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n01234"
    with answering(cut, reply(206, b"56789")) as server:
        into = BytesIO()
        with pytest.raises(BrokenOff):
            _fetch(server, into)
        assert into.getvalue() == b"01234"
        _fetch(server, into)
    assert into.getvalue() == b"0123456789"
    assert [asked.header("range") for asked in server.asked] == [None, "bytes=5-"]


def test_a_server_that_ignores_the_range_gets_the_download_begun_anew() -> None:
    """Its answer is the whole file, and must not be appended to the half that is there."""
    cut = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n01234"
    with answering(cut, reply(200, b"0123456789")) as server:
        into = BytesIO()
        with pytest.raises(BrokenOff):
            _fetch(server, into)
        _fetch(server, into)
    assert into.getvalue() == b"0123456789"


def test_the_reason_of_a_pause_is_read_from_the_metrics() -> None:
    """D3: why nothing moves. A server that does not tell is no failure."""
    told = (
        b"# HELP batchline_upstream_paused 1 while gone.\n"
        b'batchline_upstream_paused{reason="timeout",upstream="other"} 0.0\n'
        b'batchline_upstream_paused{reason="refused",upstream="default"} 1.0\n'
    )
    with answering(reply(200, told), reply(200, b"x 1\n"), reply(401, b"")) as server:
        client = _client(server.url)
        assert [client.pause_reason() for _ in range(3)] == ["refused", None, None]
