"""The client of `batchline run` against answers of every kind (F4)."""

import os
import re
import socket
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from threading import Thread

import pytest

from batchline.client.client import Client, UploadFile, is_healthy
from batchline.client.errors import (
    BrokenOff,
    ClientError,
    InputChanged,
    RequestRefused,
    Unreachable,
)
from batchline.domain.wait_text import AnyWait
from tests.support.scripted_server import ScriptedServer, answering, reply

_BATCH = b'{"id": "batch_1", "status": "in_progress", "request_counts": {"total": 3, "completed": 1, "failed": 1}}'


def _client(url: str) -> Client:
    return Client(locate=lambda: url, headers={"x-api-key": "k", "x-project-id": "p"})


def _refused(answer: bytes) -> ClientError:
    with answering(answer) as server, _client(server.url) as client, pytest.raises(ClientError) as refused:
        client.batch("batch_1")
    return refused.value


def _error(code: str) -> bytes:
    return b'{"error": {"message": "in words", "type": "t", "param": null, "code": "%s"}}' % code.encode()


def _ignore(*_: int) -> None:
    pass


def test_an_upload_is_a_form_with_the_purpose_and_the_bytes_of_the_file(tmp_path: Path) -> None:
    """B1: and the file's name can neither end its field nor begin another one."""
    path = tmp_path / 'a"b\n.jsonl'
    path.write_bytes(b"x" * 600_000 + b"\r\n--edge--")
    sent: list[int] = []
    with answering(reply(200, b'{"id": "file-1"}')) as server, _client(server.url) as client:
        assert client.upload(path, on_progress=sent.append) == "file-1"
    [asked] = server.asked
    boundary = re.fullmatch(r"multipart/form-data; boundary=(\w+)", asked.header("content-type") or "")
    assert boundary is not None
    assert asked.head.startswith("POST /v1/files HTTP/1.1")
    assert (asked.header("x-api-key"), asked.header("x-project-id")) == ("k", "p")
    assert b'name="purpose"\r\n\r\nbatch\r\n' in asked.body
    assert b'filename="a%22b%0A.jsonl"' in asked.body
    assert b"\r\n\r\n" + path.read_bytes() + f"\r\n--{boundary[1]}--\r\n".encode() in asked.body
    assert sent == sorted(sent)
    assert sent[-1] == path.stat().st_size


def test_an_upload_is_read_in_chunks(tmp_path: Path) -> None:
    """F4: the whole file is never in memory."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 3_000_000)
    sent: list[int] = []
    with answering(reply(200, b'{"id": "file-1"}')) as server, _client(server.url) as client:
        client.upload(path, on_progress=sent.append)
    assert max(end - start for start, end in pairwise([0, *sent])) <= 256 * 1024


def test_a_file_name_that_is_not_text_can_be_uploaded(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"in-\xff.jsonl")
    path.write_bytes(b"{}")
    with answering(reply(200, b'{"id": "file-1"}')) as server, _client(server.url) as client:
        client.upload(path, on_progress=_ignore)
    assert b'filename="in-?.jsonl"' in server.asked[0].body


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
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with listener, _client(url) as client, pytest.raises(RequestRefused) as refused:
        client.upload(path, on_progress=_ignore)
    thread.join(60)
    assert (refused.value.status, refused.value.code) == (413, "file_too_large")


def test_a_file_that_shrinks_while_it_is_sent_is_no_failure_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 1000)
    with UploadFile(path, on_progress=_ignore) as file:
        path.write_bytes(b"x" * 10)
        assert len(file.read(64)) == 10
        with pytest.raises(InputChanged, match="shorter"):
            file.read(64)


def test_a_file_that_grows_while_it_is_sent_is_sent_up_to_its_first_size(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 10)
    with UploadFile(path, on_progress=_ignore) as file:
        path.write_bytes(b"x" * 1000)
        assert [len(file.read(64)), len(file.read(64))] == [10, 0]


def test_a_file_that_becomes_unreadable_is_no_failure_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 10)
    file = UploadFile(path, on_progress=_ignore)
    with path.open("wb") as writable:
        os.dup2(writable.fileno(), file.fileno())
        with pytest.raises(InputChanged, match="cannot be read any more"):
            file.read(64)
    file.close()


def test_a_create_carries_its_idempotency_key() -> None:
    """A11: what makes a repeated create the same create."""
    with answering(reply(200, _BATCH)) as server, _client(server.url) as client:
        batch = client.create("file-1", endpoint="/v1/e", idempotency_key="run-7")
    assert (batch.id, batch.request_counts.done, batch.is_terminal) == ("batch_1", 2, False)
    assert server.asked[0].header("idempotency-key") == "run-7"
    assert b'"endpoint":"/v1/e"' in server.asked[0].body


def test_a_refusal_carries_the_message_and_the_headers_of_the_answer() -> None:
    refused = _refused(reply(429, _error("rate_limit_exceeded"), retry_after="7", x_batch_id="batch_9"))
    assert isinstance(refused, RequestRefused)
    assert (str(refused), refused.status, refused.retry_after) == ("in words", 429, 7.0)
    assert refused.batch_id == "batch_9"


def test_an_answer_that_is_not_the_api_is_explained() -> None:
    """A proxy between the client and the service may answer with HTML."""
    assert str(_refused(reply(502, b"<html>"))) == "the server answered 502 Word"
    for page in (b"<html>a page</html>", b'{"id": "r\xe9seau", "status": "x"}', b'{"x": ' + b"[" * 5000):
        assert "is the URL right?" in str(_refused(reply(200, page)))


def test_an_unreachable_address_is_distinguished_from_a_broken_connection() -> None:
    """F4: the first may be a wrong URL, the second is worth another try."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    for wrong in (url, "http://no-such-host.invalid"):
        with _client(wrong) as client, pytest.raises(Unreachable):
            client.batch("batch_1")
    assert type(_refused(b"")) is BrokenOff
    assert type(_refused(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")) is BrokenOff


def _fetch(server: ScriptedServer, into: BytesIO) -> None:
    with _client(server.url) as client:
        client.download("file-1", into, on_progress=_ignore)


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


def test_a_download_that_broke_off_behind_its_last_byte_is_whole() -> None:
    """B7: nothing is left, so the server refuses the range with the size of the file."""
    cut = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n01234\r\n"
    refused = b"HTTP/1.1 416 Range Not Satisfiable\r\ncontent-range: bytes */%d\r\ncontent-length: 0\r\n\r\n"
    with answering(cut, refused % 5, refused % 3) as server:
        into = BytesIO()
        with pytest.raises(BrokenOff):
            _fetch(server, into)
        _fetch(server, into)
        assert into.getvalue() == b"01234"
        with pytest.raises(RequestRefused):
            _fetch(server, into)
    assert [asked.header("range") for asked in server.asked] == [None, "bytes=5-", "bytes=5-"]


def test_a_server_that_ignores_the_range_gets_the_download_begun_anew() -> None:
    """Its answer is the whole file, and must not be appended to the half that is there."""
    cut = b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n01234"
    with answering(cut, reply(200, b"0123456789")) as server:
        into = BytesIO()
        with pytest.raises(BrokenOff):
            _fetch(server, into)
        _fetch(server, into)
    assert into.getvalue() == b"0123456789"


@pytest.mark.rule("D11", "A client reads why lines wait; a server that does not say is no failure.")
def test_why_lines_wait_is_read_from_the_progress() -> None:
    waits = b'{"waiting_for":{"reason":"slots","limit":4,"in_flight":3,"new":1},"more":2}'
    answers = [reply(200, waits), reply(200, b'{"waiting_for":null}'), reply(200, b"x 1\n"), reply(404, b"")]
    with answering(*answers) as server, _client(server.url) as client:
        first, *others = [client.waiting_for("batch_1") for _ in answers]
    assert first == AnyWait(reason="slots", limit=4, in_flight=3)
    assert others == [None] * 3
    assert server.asked[0].head.startswith("GET /v1/batches/batch_1/progress ")


def test_a_connection_is_reused_for_the_next_request() -> None:
    """A poll per second needs one connection, not one each."""
    accepted = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            accepted.append(connection)
            with connection:
                for _ in range(3):
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(_BATCH), _BATCH))

        thread = Thread(target=serve, daemon=True)
        thread.start()
        with _client(f"http://127.0.0.1:{listener.getsockname()[1]}") as client:
            assert [client.batch("batch_1").id for _ in range(3)] == ["batch_1"] * 3
        thread.join(60)
    assert len(accepted) == 1


def test_a_server_is_healthy_only_if_it_answers() -> None:
    with answering(reply(200), reply(503)) as server:
        assert is_healthy(server.url, timeout=5)
        assert not is_healthy(server.url, timeout=5)
    assert not is_healthy(server.url, timeout=5)


def test_a_page_keeps_answers_with_half_an_emoji() -> None:
    """D1: a surrogate without a partner is valid JSON, so `results` and `run --follow` must print such a line."""
    lines = [rb'{"content":"cut \ud83d"}', rb'{"content":"whole \ud83d\ude00, quoted \\ud83d"}']
    page = b'{"object":"list","data":[%b],"last_id":"c2","has_more":true}' % b",".join(lines)
    with answering(reply(200, page)) as server, _client(server.url) as client:
        found = client.results("batch_1", after=None, limit=10, status=None)
    assert [bytes(line) for line in found.data] == lines
    assert (found.last_id, found.has_more) == ("c2", True)


def test_a_page_that_is_none_is_refused_whatever_it_contains() -> None:
    with (
        answering(reply(200, rb'{"data":"\ud83d"}')) as server,
        _client(server.url) as client,
        pytest.raises(RequestRefused, match="is the URL right"),
    ):
        client.results("batch_1", after=None, limit=10, status=None)
