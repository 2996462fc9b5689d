"""The end of a connection is known before the event loop reads it (D10)."""

import gc
import select
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from batchline.upstream.end_check import EndCheck

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The client's and the server's end of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    with closing(client), closing(server):
        yield client, server


@pytest.fixture(params=["linux", "darwin"])
def check(request: pytest.FixtureRequest, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Iterator[EndCheck]:
    """The check of the client's end, as on each kind of system."""
    monkeypatch.setattr(sys, "platform", request.param)
    check = EndCheck(pair[0])
    monkeypatch.undo()
    yield check
    check.close()


def _close(server: socket.socket) -> None:
    server.close()


def _reset(server: socket.socket) -> None:
    server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    server.close()


def _shut_down(server: socket.socket) -> None:
    server.shutdown(socket.SHUT_WR)


def _send_unasked(server: socket.socket) -> None:
    server.sendall(b"HTTP/1.1 200 OK")


def test_an_open_connection_has_not_ended(pair: Pair, check: EndCheck) -> None:
    assert not check.has_ended()
    client, server = pair
    server.sendall(b"an answer")
    assert client.recv(100) == b"an answer"
    assert not check.has_ended()


@pytest.mark.parametrize("end", [_close, _reset, _shut_down, _send_unasked])
def test_an_end_or_unasked_bytes_are_seen_though_nothing_was_read(
    pair: Pair, check: EndCheck, end: Callable[[socket.socket], None]
) -> None:
    client, server = pair
    end(server)
    assert select.select([client], [], [], 10)[0], "the end arrives"
    assert check.has_ended()


def test_the_descriptor_stays_open_when_the_check_ends(pair: Pair, check: EndCheck) -> None:
    """The event loop owns it."""
    client, server = pair
    check.close()
    client.sendall(b"x")
    assert server.recv(1) == b"x"


def test_the_descriptor_stays_open_when_a_check_is_forgotten(pair: Pair) -> None:
    """An event loop that is closed with open connections tells none of them, and the number may be used again."""
    client, server = pair
    EndCheck(client)
    gc.collect()
    client.sendall(b"x")
    assert server.recv(1) == b"x"
