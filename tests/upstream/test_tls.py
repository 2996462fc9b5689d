"""The HTTP client over TLS, with a certificate made for the test."""

import ssl
from pathlib import Path
from typing import Any

import pytest
import uvloop

from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.upstream.streaming import EventStream
from tests.support.certificates import context_of, self_signed
from tests.support.raw_server import BODY, KEY, Peer, answer, client, serving


async def answers(peer: Peer) -> None:
    while await peer.request():
        await peer.send(answer())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def server_context(certificate: Path) -> ssl.SSLContext:
    return context_of(certificate)


def ask(tls: ssl.SSLContext | None, *, host: str) -> list[Reply]:
    async def main() -> list[Reply]:
        url = f"https://{host}:{{port}}/v1"
        async with serving(answers, tls=tls) as wire, client(wire.port, url=url, connect_timeout=30) as upstream:
            return [await upstream.post("/v1/chat/completions", BODY) for _ in range(2)]

    return uvloop.run(main())


def refusal(reply: Reply) -> str:
    assert isinstance(reply, Fault)
    assert reply.kind is FaultKind.REFUSED
    assert KEY not in reply.detail
    return reply.detail


def test_a_trusted_server_is_asked_by_its_name(
    monkeypatch: pytest.MonkeyPatch, certificate: Path, server_context: ssl.SSLContext
) -> None:
    """F2: https upstreams work, and a server with many names gets the requested one (SNI)."""
    names: list[str | None] = []

    def note_name(_: ssl.SSLObject | ssl.SSLSocket, name: str | None, __: ssl.SSLContext) -> Any:
        names.append(name)

    server_context.sni_callback = note_name
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert ask(server_context, host="localhost") == [Answer(status=200, body=b"{}")] * 2
    assert names == ["localhost"]


def test_a_stream_comes_over_tls(
    monkeypatch: pytest.MonkeyPatch, certificate: Path, server_context: ssl.SSLContext
) -> None:
    """E1: a stream larger than the buffer arrives completely, and the connection serves the next request."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    events = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 1000000\r\n\r\n" + b"x" * 1_000_000

    async def streams_then_answers(peer: Peer) -> None:
        await peer.request()
        await peer.send(events)
        await answers(peer)

    async def main() -> tuple[int, Reply, int]:
        url = "https://localhost:{port}/v1"
        async with serving(streams_then_answers, tls=server_context) as wire, client(wire.port, url=url) as upstream:
            async with upstream.stream("/v1/chat/completions", BODY) as stream:
                assert isinstance(stream, EventStream)
                came = sum([len(piece) async for piece in stream])
            return came, await upstream.post("/v1/chat/completions", BODY), wire.accepted

    assert uvloop.run(main()) == (1_000_000, Answer(status=200, body=b"{}"), 1)


def test_a_server_with_an_untrusted_certificate_is_refused(server_context: ssl.SSLContext) -> None:
    """F2: the key is never sent to a server that cannot prove who it is."""
    assert "self-signed certificate" in refusal(ask(server_context, host="localhost")[0])


def test_a_certificate_for_another_name_is_refused(
    monkeypatch: pytest.MonkeyPatch, certificate: Path, server_context: ssl.SSLContext
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert "TLS" in refusal(ask(server_context, host="127.0.0.1")[0])


def test_a_server_without_tls_is_refused() -> None:
    async def main() -> Reply:
        async with serving(says_something) as wire, client(wire.port, url="https://127.0.0.1:{port}/v1") as upstream:
            return await upstream.post("/v1/chat/completions", BODY)

    async def says_something(peer: Peer) -> None:
        await peer.send(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    assert "TLS" in refusal(uvloop.run(main()))


def test_a_server_that_hangs_up_in_the_handshake_is_refused() -> None:
    async def main() -> Reply:
        async with serving(hangs_up) as wire, client(wire.port, url="https://127.0.0.1:{port}/v1") as upstream:
            return await upstream.post("/v1/chat/completions", BODY)

    async def hangs_up(peer: Peer) -> None:
        """Ends at once."""

    assert refusal(uvloop.run(main())).endswith("connection reset")
