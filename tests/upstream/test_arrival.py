"""A server that accepts too slowly: its system ignores connections which seem open to the client."""

import asyncio
import socket
import sys
from collections.abc import Iterator

import pytest

from batchline.domain.replies import Answer, Fault, FaultKind
from batchline.upstream.connection import UpstreamConnection
from tests.support.raw_server import BODY, Peer, Run, Wire, answer, client

PATH = "/v1/chat/completions"
_ACCEPT_QUEUE = 2
_POSTS = 6

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell what was acknowledged")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A port whose connections nobody accepts, with room for ``_ACCEPT_QUEUE`` of them.

    Through the option, all can be opened before the first of them takes any room.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=_ACCEPT_QUEUE - 1) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 60)
        yield listener


@pytest.fixture
def first_closed(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Is set once the client has closed a connection."""
    first_closed = asyncio.Event()
    lose = UpstreamConnection.connection_lost

    def connection_lost(connection: UpstreamConnection, exc: Exception | None) -> None:
        lose(connection, exc)
        first_closed.set()

    monkeypatch.setattr(UpstreamConnection, "connection_lost", connection_lost)
    return first_closed


@pytest.mark.rule("D10", "A connection that the server never accepted is replaced, and no attempt is spent.")
def test_a_line_whose_connection_is_ignored_is_sent_on_another(
    run: Run, listener: socket.socket, first_closed: asyncio.Event
) -> None:
    """Each reaches the server once: nothing of the connection that was given up arrives later."""
    requests = []

    async def behave(peer: Peer) -> None:
        requests.append(await peer.request())
        await peer.send(answer(b'{"a":"b"}'))

    async def scenario() -> None:
        wire = Wire(behave)
        async with client(listener.getsockname()[1]) as upstream:
            posts = [upstream.post(PATH, BODY) for _ in range(_POSTS)]
            await first_closed.wait()
            server = await asyncio.start_server(wire.accept, sock=listener)
            assert all(isinstance(reply, Answer) for reply in await asyncio.gather(*posts))
        server.close()
        await wire.finish()
        await server.wait_closed()
        assert len(requests) == _POSTS

    run(scenario())


def test_a_line_that_no_connection_is_accepted_for_was_not_sent(run: Run, listener: socket.socket) -> None:
    """It is refused long before the time for an answer has passed."""

    async def scenario() -> None:
        async with client(listener.getsockname()[1], connect_timeout=0.5, request_timeout=600) as upstream:
            ended = asyncio.as_completed([upstream.post(PATH, BODY) for _ in range(_POSTS)])
            replies = [await next(ended) for _ in range(_POSTS - _ACCEPT_QUEUE)]
            faults = [reply for reply in replies if isinstance(reply, Fault)]
            assert {fault.kind for fault in faults} == {FaultKind.REFUSED}
            assert any("no connection was accepted" in fault.detail for fault in faults)

    run(scenario())
