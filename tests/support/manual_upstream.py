"""An upstream that a test plays itself, byte for byte, over a real socket."""

import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

TIMEOUT_SECONDS = 60
"""Ends a test that hangs; no test depends on the value."""

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_END = b"0\r\n\r\n"


@dataclass(frozen=True)
class UpstreamRequest:
    """A request as the upstream received it."""

    path: str
    headers: str
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Peer:
    """One connection of the service to its upstream."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(TIMEOUT_SECONDS)
        self._sock = sock
        self._file = sock.makefile("rb")

    def read(self) -> UpstreamRequest:
        start = self._file.readline().decode()
        headers = "".join(iter(lambda: self._file.readline().decode(), "\r\n")).lower()
        length = int(headers.partition("content-length: ")[2].partition("\r\n")[0] or 0)
        return UpstreamRequest(start.split()[1], headers, self._file.read(length))

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def answer(self, body: bytes, *, status: str = "200 OK") -> None:
        self.send(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)

    def begin_stream(self) -> None:
        self.send(STREAM_HEAD)

    def send_events(self, *events: bytes) -> None:
        for event in events:
            self.send(b"%x\r\n%b\r\n" % (len(event), event))

    def end_stream(self) -> None:
        self.send(STREAM_END)

    def wait_until_closed(self) -> None:
        """Wait until the service has closed its side."""
        with suppress(ConnectionResetError):
            assert self._sock.recv(1) == b""

    def close(self) -> None:
        self._file.close()
        self._sock.close()


class ManualUpstream:
    """Listens for the service's connections. Use as a context manager."""

    def __init__(self) -> None:
        self._sock = socket.create_server(("127.0.0.1", 0))
        self._sock.settimeout(TIMEOUT_SECONDS)
        self.peers: list[Peer] = []
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}/v1"

    def __enter__(self) -> "ManualUpstream":
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self.peers:
            peer.close()
        self._sock.close()

    def accept(self) -> Peer:
        """Return the service's next new connection."""
        self.peers.append(Peer(self._sock.accept()[0]))
        return self.peers[-1]


def event(data: Any) -> bytes:
    return b"data: %b\n\n" % json.dumps(data, separators=(",", ":")).encode()


def delta(text: str, **more: Any) -> dict[str, Any]:
    """Return a chunk of a chat completion."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [choice], **more}


USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
DONE = b"data: [DONE]\n\n"
