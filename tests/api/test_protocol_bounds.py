"""The bounds on what one connection can make the service hold: A14."""

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.support.api_server import CHAT, FORM, Api, field, file_part, form, read_reply, read_to_end, wait_until
from tests.support.manual_upstream import ManualUpstream, Peer, delta, event

TINY = b"GET /healthz HTTP/1.1\r\nhost:\r\n\r\n"
HEALTH = b"GET /healthz HTTP/1.1\r\nhost: test\r\n\r\n"
MiB = 1024 * 1024
CALL = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
STREAM = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()


def resident_bytes() -> int:
    """Return the memory of this process, in which the server runs too."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def send_until_full(api: Api, sock: socket.socket, data: bytes) -> int:
    """Send bytes until the server takes no more of them, and return how many it took."""
    sock.setblocking(False)
    sent = refusals = 0
    while sent < len(data) and refusals < 20:
        try:
            sent += sock.send(data[sent : sent + MiB])
            refusals = 0
        except BlockingIOError:
            # The server has run all that was due before it answers this.
            assert api.call("GET", "/healthz").status == 200
            refusals += 1
    sock.setblocking(True)
    return sent


def call_head(api: Api, body: bytes) -> bytes:
    return api.head(f"POST {CHAT}", f"content-length: {len(body)}") + body


def refusals(api: Api, bound: str) -> float:
    return api.services.metrics.registry.get_sample_value("batchline_refusals_total", {"bound": bound}) or 0.0


@pytest.mark.rule("A14", "Pipelined requests whose answers are not read cost next to no memory.")
def test_pipelined_requests_whose_answers_are_not_read_are_not_read_either(serve: Callable[..., Api]) -> None:
    api = serve()
    flood = TINY * (4 * MiB // len(TINY))
    before = resident_bytes()
    with ExitStack() as stack:
        for _ in range(5):
            send_until_full(api, stack.enter_context(api.connect()), flood)
        wait_until(lambda: api.requests_in_flight() <= 10)
        assert resident_bytes() - before < 64 * MiB


def test_one_pipelined_request_of_a_connection_is_worked_on_at_a_time(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    api = serve(upstream_url=manual_upstream.url)
    with api.connect() as sock:
        sock.sendall(call_head(api, CALL) * 3)
        peer = manual_upstream.accept()
        for _ in range(3):
            peer.read()
            assert api.requests_in_flight() == 1
            peer.answer(b'{"id":"c","choices":[]}')


def test_every_pipelined_request_is_answered_once_the_client_reads(api: Api) -> None:
    count = 8000
    with api.connect() as sock:
        sent, received = 0, 0
        flood = TINY * count
        while received < count:
            with suppress(BlockingIOError):
                sent += sock.send(flood[sent : sent + MiB], socket.MSG_DONTWAIT)
            received += sock.recv(MiB).count(b'{"status":"ok"}')
        # An answer can be cut in two by a read, so some may be counted late, but none twice.
        assert sent == len(flood)


@pytest.mark.parametrize("step", [1, 3, 7])
def test_requests_are_told_apart_wherever_their_bytes_are_cut(api: Api, step: int) -> None:
    """A head that ends in one read and begins in another, chunks and trailers included."""
    requests = (
        HEALTH
        + b"\r\n\r\n"
        + api.head("POST /v1/batches", "transfer-encoding: chunked")
        + b"4\r\n\r\n\r\n\r\n2\r\n{}\r\n0\r\nt: v\r\n\r\n"
        + api.head("POST /v1/batches", "content-length: 8")
        + b"GET / \r\n"
        + b"GET /healthz HTTP/1.1\r\nhost: test\r\nconnection: close\r\n\r\n"
    )
    with api.connect() as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(requests), step):
            sock.sendall(requests[start : start + step])
        answers = read_to_end(sock).split(b"HTTP/1.1 ")[1:]
        assert [answer[:3] for answer in answers] == [b"200", b"400", b"400", b"200"]


@pytest.mark.parametrize("behind", [HEALTH, TINY * (MiB // len(TINY))], ids=["one", "many"])
def test_a_call_left_behind_pipelined_requests_ends_with_its_answer(
    serve: Callable[..., Api], manual_upstream: ManualUpstream, behind: bytes
) -> None:
    """A14, E2: its client is charged like one that stays, and nothing is left of its connection."""
    api = serve(upstream_url=manual_upstream.url)
    with api.connect() as sock:
        sock.sendall(call_head(api, CALL))
        peer = manual_upstream.accept()
        peer.read()
        sock.sendall(behind)
    assert api.requests_in_flight() == 1
    peer.answer(b"{}")
    wait_until(lambda: api.requests_in_flight() == 0)


@pytest.mark.parametrize("body", [b"1\r\nx\r\n", b"4\r\n\r\n\r\n\r\n"])
def test_a_body_of_tiny_chunks_is_read_within_bounds(api: Api, body: bytes) -> None:
    with api.connect() as sock:
        sock.sendall(api.head("POST /v1/batches", "transfer-encoding: chunked"))
        sock.sendall(body * 100_000 + b"0\r\n\r\n")
        assert read_reply(sock).status == 400


@pytest.fixture(scope="module")
def impatient(shared: Callable[..., Api]) -> Api:
    """Return a server that soon gives up on a client that does not read."""
    return shared(write_timeout_seconds=0.4)


def upload_large(api: Api) -> str:
    body = form(field("purpose", "batch"), file_part(b"x" * 32 * MiB))
    file_id: str = api.call("POST", "/v1/files", body=body, headers=FORM).json["id"]
    return file_id


@pytest.mark.rule("A14", "A client that reads nothing of its answer is disconnected.")
def test_a_download_that_is_not_read_is_given_up(impatient: Api) -> None:
    head = impatient.head(f"GET /v1/files/{upload_large(impatient)}/content")
    before = refusals(impatient, "unread_answer")
    with impatient.connect() as sock:
        sock.sendall(head)
        assert sock.recv(1, socket.MSG_PEEK)
        wait_until(lambda: impatient.requests_in_flight() == 0)
        with suppress(ConnectionResetError):
            assert len(read_to_end(sock)) < 32 * MiB
    assert refusals(impatient, "unread_answer") == before + 1


@pytest.mark.rule("A4", "A download that its client has not read yet takes one of the downloads of its project.")
def test_a_download_that_is_not_read_takes_a_place_of_its_project(serve: Callable[..., Api]) -> None:
    api = serve(max_project_downloads=1, write_timeout_seconds=3600)
    file_id, other = upload_large(api), api.new_account("other")
    path = f"/v1/files/{file_id}/content"
    with connect_with_small_buffer(api) as sock:
        sock.sendall(api.head(f"GET {path}"))
        assert sock.recv(1, socket.MSG_PEEK)
        refused = api.call("GET", path)
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "1"
        assert refusals(api, "project_downloads") == 1
        assert api.call("HEAD", path).status == 200
        theirs = api.upload(account=other).json["id"]
        assert api.call("GET", f"/v1/files/{theirs}/content", account=other).status == 200
    wait_until(lambda: api.requests_in_flight() == 0)
    assert api.call("GET", path).status == 200


@pytest.mark.rule("F3", "A download ends soon after its key was revoked.")
def test_a_download_ends_with_its_key(serve: Callable[..., Api]) -> None:
    api = serve(write_timeout_seconds=3600)
    path = f"/v1/files/{upload_large(api)}/content"
    api.account = api.new_account("first")
    with connect_with_small_buffer(api) as sock:
        sock.sendall(api.head(f"GET {path}"))
        assert sock.recv(1, socket.MSG_PEEK)
        assert api.await_(api.store.revoke_key(api.account.key_id, at=2))
        wait_until(lambda: api.requests_in_flight() == 0)
        assert len(read_to_end(sock)) < 32 * MiB


def test_a_download_that_is_read_slowly_is_not_given_up(impatient: Api) -> None:
    head = impatient.head(f"GET /v1/files/{upload_large(impatient)}/content", "connection: close")
    with impatient.connect() as sock, impatient.connect() as idle:
        sock.sendall(head)
        received = 0
        while chunk := sock.recv(MiB):
            received += len(chunk)
            idle.sendall(HEALTH)
            read_reply(idle)
        assert received > 32 * MiB


@pytest.mark.rule("A4", "A call whose client has not read the answer yet takes one of the calls of its project.")
@pytest.mark.parametrize("body", [CALL, STREAM], ids=["whole", "streamed"])
def test_a_call_whose_answer_is_not_read_takes_a_place_of_its_project(
    serve: Callable[..., Api], manual_upstream: ManualUpstream, body: bytes
) -> None:
    """A4: but no slot of the upstream, which has answered it."""
    api = serve(upstream_url=manual_upstream.url, max_project_calls=1, write_timeout_seconds=3600)
    with connect_with_small_buffer(api) as sock:
        sock.sendall(call_head(api, body))
        peer = manual_upstream.accept()
        peer.read()
        peer.answer(b'{"choices":[],"text":"%b"}' % (b"x" * 12 * MiB))
        wait_until(lambda: unread_connections(api) == 1)
        assert api.call("POST", CHAT, body=CALL).status == 429
        assert refusals(api, "project_calls") == 1
        assert api.services.inference._router.calls("default").total == 0
        assert read_reply(sock).status == 200
    wait_until(lambda: api.requests_in_flight() == 0)
    with ExitStack() as stack:
        calling = stack.enter_context(api.connect())
        calling.sendall(call_head(api, CALL))
        peer.read()
        peer.answer(b"{}")
        assert read_reply(calling).status == 200


@pytest.mark.rule("A4", "An answer that is not read counts with its bytes for its project.")
def test_the_bytes_of_an_answer_that_is_not_read_are_held_by_its_project(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    api = serve(upstream_url=manual_upstream.url, max_project_call_bytes=10 * MiB, write_timeout_seconds=3600)
    with connect_with_small_buffer(api) as sock:
        sock.sendall(call_head(api, CALL))
        peer = manual_upstream.accept()
        peer.read()
        peer.answer(b'{"text":"%b"}' % (b"x" * 12 * MiB))
        wait_until(lambda: unread_connections(api) == 1)
        assert api.call("POST", CHAT, body=CALL).status == 429
        assert refusals(api, "project_call_bytes") == 1


def _send_until_closed(peer: Peer, data: bytes) -> None:
    with suppress(OSError):
        while True:
            peer.send_events(data)


def test_a_stream_that_is_not_read_is_given_up(serve: Callable[..., Api], manual_upstream: ManualUpstream) -> None:
    api = serve(upstream_url=manual_upstream.url, write_timeout_seconds=0.4)
    with api.connect() as sock:
        sock.sendall(call_head(api, STREAM))
        peer = manual_upstream.accept()
        peer.read()
        peer.begin_stream()
        _send_until_closed(peer, event(delta("y" * 60_000)))
        wait_until(lambda: api.requests_in_flight() == 0)


def test_an_idle_connection_with_an_unread_answer_is_given_up(impatient: Api) -> None:
    """Answers too small to pause the writing count too."""
    before = impatient.connections()
    with impatient.connect() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        send_until_full(impatient, sock, TINY * 100_000)
        wait_until(lambda: impatient.connections() <= before)


@pytest.mark.rule("A14", "A connection over the limit is refused at once, and the others go on.")
def test_a_connection_over_the_limit_is_refused(serve: Callable[..., Api], manual_upstream: ManualUpstream) -> None:
    api = serve(max_connections=3, upstream_url=manual_upstream.url)
    wait_until(lambda: api.connections() == 0)
    with ExitStack() as stack:
        kept = [stack.enter_context(api.connect()) for _ in range(3)]
        peers = []
        for sock in kept:
            sock.sendall(call_head(api, CALL))
            peers.append(manual_upstream.accept())
        with api.connect() as sock:
            reply = read_reply(sock)
            assert reply.status == 503
            assert reply.error["code"] == "service_unavailable"
            assert reply.headers["retry-after"] == "2"
            assert read_to_end(sock) == b""
        for sock, peer in zip(kept, peers, strict=True):
            peer.read()
            peer.answer(b'{"id":"c","choices":[]}')
            assert read_reply(sock).status == 200
        assert refusals(api, "connections") == 1
    wait_until(lambda: api.connections() == 0)
    assert api.call("GET", "/healthz").status == 200


@pytest.mark.rule("A14", "At the limit, the connection that waits longest for a request gives way to a new one.")
def test_the_oldest_idle_connection_gives_way_to_a_new_one(serve: Callable[..., Api]) -> None:
    """Strangers that say nothing, or not all of a head, cannot keep newcomers out until their time is over."""
    api = serve(max_connections=3, header_timeout_seconds=3600)
    wait_until(lambda: api.connections() == 0)
    with ExitStack() as stack:
        known, silent, slow = (stack.enter_context(api.connect()) for _ in range(3))
        known.sendall(HEALTH)
        assert read_reply(known).status == 200
        slow.sendall(HEALTH[:-2])
        wait_until(lambda: api.connections() == 3)
        for stranger in (silent, slow, known):
            _assert_gives_way(stranger, stack.enter_context(api.connect()))
        assert refusals(api, "idle_connections") == 3
        assert refusals(api, "connections") == 0


def _assert_gives_way(stranger: socket.socket, newcomer: socket.socket) -> None:
    """Check that a new connection is served, and that an old one was closed for it."""
    newcomer.sendall(HEALTH)
    assert read_reply(newcomer).status == 200
    with suppress(ConnectionResetError):
        assert read_to_end(stranger) == b""


def test_a_connection_that_still_has_something_to_do_does_not_give_way(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    """A14: neither a request in progress, nor a body on its way, nor an answer that is not read yet."""
    api = serve(max_connections=3, upstream_url=manual_upstream.url)
    file_id = upload_large(api)
    wait_until(lambda: api.connections() == 0)
    with ExitStack() as stack:
        calling, uploading, downloading = (stack.enter_context(api.connect()) for _ in range(3))
        calling.sendall(call_head(api, CALL))
        manual_upstream.accept().read()
        uploading.sendall(api.head("POST /v1/files", f"content-type: {FORM['content-type']}", "content-length: 99"))
        downloading.sendall(api.head(f"GET /v1/files/{file_id}/content"))
        assert downloading.recv(1, socket.MSG_PEEK)
        wait_until(lambda: api.requests_in_flight() == 3)
        with api.connect() as refused:
            assert read_reply(refused).status == 503
        assert api.connections() >= 3
        assert refusals(api, "idle_connections") == 0


_NO_KEY_BODIES = {
    "a length": b"POST /v1/files HTTP/1.1\r\nhost: test\r\ncontent-length: 100000\r\n\r\nabc",
    "chunks": b"POST /nope HTTP/1.1\r\nhost: test\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
}


def connect_with_small_buffer(api: Api) -> socket.socket:
    """Return a connection whose client takes next to nothing that it does not read."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(60)
    sock.connect(("127.0.0.1", api.port))
    return sock


def unread_connections(api: Api) -> int:
    """Return how many connections have answers that the kernel does not take from the server."""
    connections = list(api.server._uvicorn.server_state.connections)
    return sum(1 for connection in connections if connection.transport.get_write_buffer_size())


@pytest.mark.parametrize("request_bytes", _NO_KEY_BODIES.values(), ids=_NO_KEY_BODIES)
def test_a_refused_request_whose_body_does_not_come_gives_way(serve: Callable[..., Api], request_bytes: bytes) -> None:
    """A14: a stranger without a key cannot keep the connections that only wait for the rest of a body."""
    api = serve(max_connections=3, body_timeout_seconds=3600)
    wait_until(lambda: api.connections() == 0)
    with ExitStack() as stack:
        strangers = [stack.enter_context(api.connect()) for _ in range(3)]
        for stranger in strangers:
            stranger.sendall(request_bytes)
            assert read_reply(stranger).status in (401, 404)
        for stranger in strangers:
            _assert_gives_way(stranger, stack.enter_context(api.connect()))
        assert refusals(api, "idle_connections") == 3
        assert refusals(api, "connections") == 0


def test_a_connection_with_unread_answers_of_a_stranger_gives_way_after_the_idle_ones(
    serve: Callable[..., Api], manual_upstream: ManualUpstream
) -> None:
    """A14: a call with a key goes on meanwhile."""
    api = serve(max_connections=4, upstream_url=manual_upstream.url, write_timeout_seconds=3600)
    wait_until(lambda: api.connections() == 0)
    with ExitStack() as stack:
        calling, idle = (stack.enter_context(api.connect()) for _ in range(2))
        calling.sendall(call_head(api, CALL))
        peer = manual_upstream.accept()
        peer.read()
        unread = [stack.enter_context(connect_with_small_buffer(api)) for _ in range(2)]
        for sock in unread:
            sock.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: test\r\n\r\n" * 400)
        wait_until(lambda: unread_connections(api) == 2)
        for left in (2, 1, 0):
            stack.enter_context(newcomer := api.connect())
            newcomer.sendall(call_head(api, CALL))
            manual_upstream.accept().read()
            assert unread_connections(api) == left
        assert read_to_end(idle) == b""
        with api.connect() as refused:
            assert read_reply(refused).status == 503
        assert refusals(api, "idle_connections") == 3
        peer.answer(b'{"id":"c","choices":[]}')
        assert read_reply(calling).status == 200


def test_a_connection_with_an_unread_answer_of_a_key_does_not_give_way(serve: Callable[..., Api]) -> None:
    """A14: not even if a request without a key follows."""
    api = serve(max_connections=1, write_timeout_seconds=3600)
    path = f"GET /v1/files/{upload_large(api)}/content"
    wait_until(lambda: api.connections() == 0)
    with connect_with_small_buffer(api) as sock:
        sock.sendall(api.head(path, "range: bytes=0-8000000") + HEALTH)
        assert sock.recv(1, socket.MSG_PEEK)
        with api.connect() as refused:
            assert read_reply(refused).status == 503
        assert read_reply(sock).status == 206


def test_a_refused_upload_with_a_key_gives_way_once_its_answer_is_read(serve: Callable[..., Api]) -> None:
    """A14: its answer was decided, and the rest of its body changes nothing."""
    api = serve(max_connections=1)
    wait_until(lambda: api.connections() == 0)
    with api.connect() as sock:
        sock.sendall(api.head("POST /v1/files", "content-type: text/plain", "content-length: 5000"))
        assert read_reply(sock).status == 400
        with api.connect() as newcomer:
            newcomer.sendall(HEALTH)
            assert read_reply(newcomer).status == 200


def _head_seconds(api: Api, head: bytes) -> float:
    """Return the CPU time that a request takes, the client's part included, at best."""
    taken = []
    for _ in range(5):
        with api.connect() as sock:
            began = time.process_time()
            sock.sendall(head)
            read_reply(sock)
            taken.append(time.process_time() - began)
    return min(taken)


_LONG = 60 * 1024
_HEADS = {
    "many parameters": ("GET /v1/files?" + "a&" * 4000,),
    "escaped parameters": ("GET /v1/batches?" + "a=%41&" * 1300,),
    "parameters of a type": (
        "POST /v1/files",
        "content-length: 0",
        "content-type: multipart/form-data" + "; a=b" * 12000,
    ),
    "semicolons in a type": ("POST /v1/files", "content-length: 0", "content-type: multipart/form-data" + ";" * _LONG),
    "many headers": ("GET /v1/files?limit=1", *(f"x-{n}: {'y' * 470}" for n in range(120))),
    "ranges": ("GET /v1/files/file-x/content", "range: bytes=" + "0-1," * (_LONG // 4)),
    "cookies": ("GET /v1/files?limit=1", "cookie: " + "a=b;" * (_LONG // 4)),
    "a long path": ("GET /v1/files/" + "%41" * 2600,),
}


@pytest.mark.proof
@pytest.mark.parametrize("lines", _HEADS.values(), ids=_HEADS)
def test_no_head_blocks_the_loop_for_long(api: Api, lines: tuple[str, ...]) -> None:
    """A14: one client's head is not what others wait for. The time is that of the CPU, not of the clock."""
    usual, longest = _head_seconds(api, api.head("GET /v1/files?limit=1")), _head_seconds(api, api.head(*lines))
    print(f"{longest * 1000:.2f} ms of CPU; a usual request takes {usual * 1000:.2f} ms")
    assert longest - usual < 0.005


@pytest.mark.rule("A14", "More than 256 parameters in a URL are refused, and a Content-Type over 1 KiB.")
def test_heads_that_take_long_to_read_are_refused(api: Api) -> None:
    many = api.call("GET", "/v1/files?" + "&".join(["a=b"] * 257))
    assert (many.status, many.error["message"]) == (400, "The request's URL has more than 256 parameters")
    assert api.call("GET", "/v1/files?" + "&".join(["a=b"] * 256)).status == 200
    long = api.call("POST", "/v1/files", body=b"", headers={"content-type": "multipart/form-data" + ";" * 1024})
    assert (long.status, long.error["code"]) == (400, "invalid_content_type")
