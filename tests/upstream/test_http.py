"""The HTTP client on the wire: for any bytes from a server one reply, bounded memory, and no other line's bytes."""

import asyncio
import gzip
import tracemalloc
from collections.abc import Callable
from itertools import repeat
from typing import Any

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from batchline import __version__
from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.upstream.connection import UpstreamConnection
from batchline.upstream.http import HttpUpstream
from tests.support.raw_server import (
    BODY,
    KEY,
    Behaviour,
    Peer,
    Run,
    answer,
    chunked,
    chunked_with,
    client,
    sends,
    serving,
)

PATH = "/v1/chat/completions"
EXPECTED = Answer(status=200, body=b'{"a":"b"}', request_id="req_1")
PLAIN = answer(EXPECTED.body, "X-Request-Id: req_1", "Server: wire")
CHUNKED = chunked(b'{"a":', b'"b"}').replace(b"\r\n\r\n", b"\r\nX-Request-Id: req_1\r\n\r\n", 1)
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
HEAD_LIMIT = 64 * 1024


class Arrivals:
    """Lets a server continue only after the client has read what was sent, so that pieces arrive separately."""

    def __init__(self) -> None:
        self._arrived = asyncio.Event()
        self._closed = False

    def note(self, *, closed: bool = False) -> None:
        self._closed = self._closed or closed
        self._arrived.set()

    async def next(self) -> bool:
        """Wait for the client to read, and return whether its connection is still open."""
        await self._arrived.wait()
        if not self._closed:
            self._arrived.clear()
        return not self._closed


@pytest.mark.parametrize("end", ["\n", "\r\n", " ", "\x00", "\x7f", "\u2028", " HTTP/1.1\r\nx: y"])
@pytest.mark.anyio
async def test_a_path_that_would_break_the_request_line_is_refused(end: str) -> None:
    async with serving(sends(PLAIN)) as wire, client(wire.port) as upstream:
        with pytest.raises(ValueError, match="is no path"):
            upstream.post(PATH + end, BODY)
        with pytest.raises(ValueError, match="is no path"):
            await upstream.get(PATH + end)


@pytest.fixture
def arrivals(monkeypatch: pytest.MonkeyPatch) -> Arrivals:
    arrivals = Arrivals()
    receive, lose = UpstreamConnection.data_received, UpstreamConnection.connection_lost

    def data_received(connection: UpstreamConnection, data: bytes) -> None:
        receive(connection, data)
        arrivals.note()

    def connection_lost(connection: UpstreamConnection, exc: Exception | None) -> None:
        lose(connection, exc)
        arrivals.note(closed=True)

    monkeypatch.setattr(UpstreamConnection, "data_received", data_received)
    monkeypatch.setattr(UpstreamConnection, "connection_lost", connection_lost)
    return arrivals


def sends_endlessly(start: bytes, piece: bytes) -> Behaviour:
    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(start)
        for more in repeat(piece):
            await peer.send(more)

    return behave


async def post(upstream: HttpUpstream) -> Reply:
    """Post, and check that a fault contains neither the key nor the body."""
    reply = await upstream.post(PATH, BODY)
    if isinstance(reply, Fault):
        assert KEY not in reply.detail
        assert BODY.decode() not in reply.detail
    return reply


async def ask(behave: Behaviour, **options: Any) -> Reply:
    async with serving(behave) as wire, client(wire.port, **options) as upstream:
        return await post(upstream)


def kind_of(reply: Reply) -> FaultKind | None:
    return reply.kind if isinstance(reply, Fault) else None


@pytest.mark.rule("D1", "The line's body is posted to the endpoint below the upstream's base.")
@pytest.mark.parametrize(
    ("base", "target"),
    [("/v1", PATH), ("/v1/", PATH), ("/x/v1", "/x" + PATH), ("/a b/v1", "/a%20b" + PATH), ("", PATH)],
)
def test_the_body_is_sent_unchanged_below_the_base_url(run: Run, base: str, target: str) -> None:
    """D1: the unchanged body, to the path below the base URL, with exactly these headers."""
    seen: list[bytes] = []

    async def behave(peer: Peer) -> None:
        seen.append(await peer.request())
        await peer.send(answer())

    async def main() -> int:
        async with serving(behave) as wire, client(wire.port, url="http://127.0.0.1:{port}" + base) as upstream:
            await post(upstream)
            return wire.port

    port = run(main())
    assert seen == [
        f"POST {target} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Accept: application/json\r\nAccept-Encoding: identity\r\nUser-Agent: batchline/{__version__}\r\n"
        f"Authorization: Bearer {KEY}\r\n"
        f"Content-Length: {len(BODY)}\r\n\r\n".encode()
        + BODY
    ]


def test_every_path_is_its_own(run: Run) -> None:
    """D1: one upstream serves lines of several endpoints in turn."""
    paths = ["/v1/chat/completions", "/v1/embeddings", "/v1/chat/completions"]
    seen: list[bytes] = []

    async def behave(peer: Peer) -> None:
        while True:
            seen.append(await peer.request())
            await peer.send(answer())

    async def main() -> None:
        async with serving(behave) as wire, client(wire.port) as upstream:
            for n, path in enumerate(paths):
                await upstream.post(path, b"x" * n)

    run(main())
    assert [request.split(b" ")[1].decode() for request in seen] == paths
    assert [request.partition(b"\r\n\r\n")[2] for request in seen] == [b"", b"x", b"xx"]


def test_without_a_key_no_authorization_is_sent(run: Run) -> None:
    seen: list[bytes] = []

    async def behave(peer: Peer) -> None:
        seen.append(await peer.request())
        await peer.send(answer())

    run(ask(behave, api_key=None))
    assert b"authorization" not in seen[0].lower()


def test_a_large_body_arrives_whole(run: Run) -> None:
    """C14: a line may be as large as a megabyte."""
    body = b"x" * 1_048_576
    seen: list[bytes] = []

    async def behave(peer: Peer) -> None:
        seen.append(await peer.request())
        await peer.send(answer())

    async def main() -> Reply:
        async with serving(behave) as wire, client(wire.port) as upstream:
            return await upstream.post(PATH, body)

    assert run(main()) == Answer(status=200, body=b"{}")
    assert seen[0].endswith(b"\r\n\r\n" + body)


@pytest.mark.parametrize("wire_bytes", [PLAIN, CHUNKED, INTERIM + PLAIN], ids=["plain", "chunked", "interim"])
def test_an_answer_split_anywhere_is_the_same(run: Run, arrivals: Arrivals, wire_bytes: bytes) -> None:
    """D1: the reply does not depend on where the network divides an answer: at each byte, or at all of them."""
    splits = [[wire_bytes[:n], wire_bytes[n:]] for n in range(1, len(wire_bytes))]
    splits.append([wire_bytes[n : n + 1] for n in range(len(wire_bytes))])

    async def behave(peer: Peer) -> None:
        for pieces in splits:
            await peer.request()
            for piece in pieces:
                await peer.send(piece)
                await arrivals.next()

    async def main() -> list[Reply]:
        async with serving(behave) as wire, client(wire.port) as upstream:
            return [await post(upstream) for _ in splits]

    assert run(main()) == [EXPECTED] * len(splits)


@pytest.mark.parametrize(
    "wire_bytes",
    [
        b"HTTP/1.1 200 OK\r\nConnection: close\r\nX-Request-Id: req_1\r\n\r\n" + EXPECTED.body,
        b"HTTP/1.0 200 OK\r\nX-Request-Id: req_1\r\n\r\n" + EXPECTED.body,
        INTERIM + b"HTTP/1.1 200 OK\r\nX-Request-Id: req_1\r\n\r\n" + EXPECTED.body,
    ],
)
def test_an_answer_without_a_length_is_complete_at_the_end(run: Run, wire_bytes: bytes) -> None:
    """D1: an answer may end with its connection."""
    assert run(ask(sends(wire_bytes))) == EXPECTED


def test_a_reset_is_no_end_of_an_answer(run: Run, arrivals: Arrivals) -> None:
    """D1: if an answer ends with its connection, a reset still means that a part may be missing."""

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\n{}")
        await arrivals.next()
        peer.reset()

    assert kind_of(run(ask(behave))) is FaultKind.BROKEN


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_that_can_have_no_body_is_complete(run: Run, status: int) -> None:
    reply = run(ask(sends(f"HTTP/1.1 {status} None\r\n\r\n".encode())))
    assert reply == Answer(status=status, body=b"")


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_redirects_are_not_followed(run: Run, status: int) -> None:
    """D1: the redirect is the answer, and its target gets no request."""

    async def main() -> tuple[Reply, int]:
        moved = answer(b"", "Location: /v1/other", status=f"{status} Moved")
        async with serving(sends(moved)) as wire, client(wire.port) as upstream:
            return await post(upstream), wire.accepted

    assert run(main()) == (Answer(status=status, body=b""), 1)


@pytest.mark.parametrize(
    "wire_bytes",
    [
        b"",
        b"HTTP/1.1 200",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 100 Continue\r\n\r\n",
        answer(b"{}")[:-1],
        chunked(b"{}", end=b""),
        chunked(b"{}", end=b"0\r\n"),
        chunked(b"{}", end=b"5\r\nab"),
    ],
)
def test_an_answer_that_breaks_off_is_broken(run: Run, wire_bytes: bytes) -> None:
    """D2: half an answer is never taken for a whole one."""
    assert kind_of(run(ask(sends(wire_bytes)))) is FaultKind.BROKEN


@pytest.mark.parametrize(
    "wire_bytes",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x15\x03\x01\x00\x02\x02\x46",
        b"HTTP/1.1 999 Odd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 000 Odd\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        answer(b"{}", "Content-Length: 3"),
        answer(b"{}", "Transfer-Encoding: chunked"),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_what_is_no_answer_is_garbled(run: Run, wire_bytes: bytes) -> None:
    """D2: bytes that are not HTTP, or an answer that was not asked for."""
    assert kind_of(run(ask(sends(wire_bytes)))) is FaultKind.GARBLED


def test_identity_is_no_encoding(run: Run) -> None:
    assert run(ask(sends(answer(b"{}", "Content-Encoding: identity")))) == Answer(status=200, body=b"{}")


@pytest.mark.rule("D1", "An answer that is compressed although it should not be is decompressed, within the limit.")
@pytest.mark.parametrize("make", [answer, chunked_with], ids=["plain", "chunked"])
def test_a_compressed_answer_is_decompressed(run: Run, make: Callable[..., bytes]) -> None:
    """D1: the upstream was paid for it, and the connection serves the next line too."""

    async def behave(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(make(gzip.compress(EXPECTED.body), "Content-Encoding: GZIP", "X-Request-Id: req_1"))

    async def main() -> tuple[list[Reply], int]:
        async with serving(behave) as wire, client(wire.port) as upstream:
            return [await post(upstream), await post(upstream)], wire.accepted

    assert run(main()) == ([EXPECTED, EXPECTED], 1)


@pytest.mark.parametrize(
    ("body", "encoding", "detail"),
    [
        (gzip.compress(bytes(10_000_000)), "gzip", "answer over 1048576 bytes"),
        (gzip.compress(b"{}")[:-1], "gzip", "the compressed answer ends early"),
        (b"{}", "gzip", "the answer cannot be decompressed"),
        (b"{}", "br", "the answer has the encoding 'br', and identity was asked for"),
        (b"{}", "gzip, gzip", "the answer has the encoding 'gzip, gzip', and identity was asked for"),
    ],
    ids=["bomb", "cut", "not gzip", "unknown", "twice"],
)
def test_a_success_that_cannot_be_decompressed_is_unreadable(run: Run, body: bytes, encoding: str, detail: str) -> None:
    """D1: the fault says that another attempt is of no use."""
    reply = run(ask(sends(answer(body, f"Content-Encoding: {encoding}"))))
    assert reply == Fault(kind=FaultKind.UNREADABLE, detail=detail)


@pytest.mark.parametrize("encoding", ["br", "gzip"])
def test_a_refusal_that_cannot_be_decompressed_keeps_its_status(run: Run, encoding: str) -> None:
    """D2: the error page of a gateway may be compressed in any way, and a 429 stays a 429."""
    reply = run(ask(sends(answer(b"?", f"Content-Encoding: {encoding}", "Retry-After: 7", status="429 Slow"))))
    assert isinstance(reply, Answer)
    assert (reply.status, reply.retry_after, reply.body) == (429, 7, b"")


@pytest.mark.parametrize("status", [204, 304])
def test_an_encoding_of_no_body_is_no_fault(run: Run, status: int) -> None:
    reply = run(ask(sends(f"HTTP/1.1 {status} None\r\nContent-Encoding: gzip\r\n\r\n".encode())))
    assert reply == Answer(status=status, body=b"")


@pytest.mark.parametrize(
    "behave",
    [
        sends_endlessly(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536),
        sends_endlessly(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b"x" * 65536 + b"\r\n"
        ),
        sends(b"HTTP/1.1 200 OK\r\nContent-Length: 1000001\r\n\r\n"),
    ],
    ids=["until the end", "chunked", "by its own word"],
)
def test_an_oversized_answer_is_abandoned_at_once(run: Run, behave: Behaviour) -> None:
    """D1: reading stops at the limit (the server would never end), or before the body if the length is known."""
    reply = run(ask(behave, max_answer_bytes=1_000_000))
    assert reply == Fault(kind=FaultKind.GARBLED, detail="answer over 1000000 bytes", answer_bytes=1_000_000)


@pytest.mark.parametrize("make", [answer, chunked])
def test_an_answer_of_exactly_the_limit_is_taken(run: Run, make: Callable[[bytes], bytes]) -> None:
    """D1: only more than the limit is a fault."""
    reply = run(ask(sends(make(b"x" * 1000)), max_answer_bytes=1000))
    assert reply == Answer(status=200, body=b"x" * 1000)


@pytest.mark.parametrize("surplus", [answer(b'"surplus"'), b"HTTP/1.1 20", b"H", b"{}"], ids=repr)
def test_bytes_past_the_announced_length_are_no_part_of_any_answer(run: Run, surplus: bytes) -> None:
    """C12: a wrong Content-Length closes the connection; the surplus is not read as the next line's answer."""

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(answer(b"{}") + surplus)
        await peer.left()

    async def main() -> tuple[list[Reply], int]:
        async with serving(behave) as wire, client(wire.port) as upstream:
            return [await post(upstream), await post(upstream)], wire.accepted

    assert run(main()) == ([Answer(status=200, body=b"{}")] * 2, 2)


def test_tiny_chunks_cost_no_more_than_their_bytes(run: Run) -> None:
    """D1: memory is bounded by the answer's size, not by the number of its pieces."""
    size = 400_000
    pieces = chunked(*[b"xx"] * (size // 2))

    async def main() -> tuple[Reply, int]:
        async with serving(sends(pieces)) as wire, client(wire.port) as upstream:
            tracemalloc.start()
            try:
                reply = await post(upstream)
                return reply, tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    reply, peak = run(main())
    assert reply == Answer(status=200, body=b"x" * size)
    # The server's own buffer, the body twice, and one read; a list of the pieces would be 9 MB by itself.
    assert peak < 6_000_000


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"HTTP/1.1 200 ", b"O" * 8192),
        (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n" * 1000),
        (b"HTTP/1.1 200 OK\r\nA", b"a" * 8192),
        (b"HTTP/1.1 200 OK\r\nA: ", b"a" * 8192),
        (b"", b"HTTP/1.1 102 Processing\r\n\r\n" * 100),
        (chunked(b"{}", end=b"5;"), b"a" * 8192),
        (chunked(b"{}", end=b"0\r\nA: "), b"a" * 8192),
    ],
    ids=["status", "many", "name", "value", "interim", "extension", "trailer"],
)
def test_what_surrounds_an_answer_is_bounded(run: Run, arrivals: Arrivals, start: bytes, piece: bytes) -> None:
    """D2: a server cannot fill memory, or keep us reading, with anything outside of an answer's body."""

    async def behave(peer: Peer) -> None:
        await peer.request()
        await peer.send(start + piece)
        while await arrivals.next():
            await peer.send(piece)

    assert run(ask(behave)) == Fault(kind=FaultKind.GARBLED, detail=f"headers over {HEAD_LIMIT} bytes")


def test_headers_in_one_piece_are_bounded_too(run: Run) -> None:
    """D2: the limit does not depend on how the network divides the bytes."""
    bomb = b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * (HEAD_LIMIT // 6 + 1) + b"Content-Length: 2\r\n\r\n{}"
    assert run(ask(sends(bomb))) == Fault(kind=FaultKind.GARBLED, detail=f"headers over {HEAD_LIMIT} bytes")


def test_headers_of_a_usual_size_are_fine(run: Run) -> None:
    headers = [f"X-{n}: {'v' * 1000}" for n in range(60)]
    assert run(ask(sends(answer(b"{}", *headers)))) == Answer(status=200, body=b"{}")


@settings(max_examples=60, deadline=None)
@given(
    st.binary(max_size=200)
    | st.builds(
        lambda text, at, junk: text[:at] + junk + text[at + len(junk) :],
        st.sampled_from([PLAIN, CHUNKED, INTERIM + PLAIN]),
        st.integers(0, 150),
        st.binary(min_size=1, max_size=4),
    )
)
def test_no_bytes_raise(wire_bytes: bytes) -> None:
    """D2: every failure of an answer is a reply, not an exception."""
    reply = uvloop.run(ask(sends(wire_bytes), request_timeout=30))
    assert isinstance(reply, Answer | Fault)
