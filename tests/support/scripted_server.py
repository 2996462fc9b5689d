"""A server that sends the bytes that a test gives it, and records the requests."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import NamedTuple


class Asked(NamedTuple):
    """A request that the server got."""

    head: str
    body: bytes

    def header(self, name: str) -> str | None:
        for line in self.head.splitlines()[1:]:
            key, _, value = line.partition(":")
            if key.lower() == name:
                return value.strip()
        return None


Answer = Callable[[Asked], bytes]
"""Returns the bytes to send before the connection is closed."""


def reply(status: int, body: bytes = b"", **headers: str) -> bytes:
    """Return an HTTP answer."""
    # Each answer has its own connection, which the client must not try to reuse.
    lines = [f"HTTP/1.1 {status} Word", f"content-length: {len(body)}", "connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items() if name != "connection"]
    return "\r\n".join([*lines, "", ""]).encode() + body


class ScriptedServer:
    """A server for as many connections as there are answers, one request each."""

    def __init__(self, answers: list[Answer]) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked: list[Asked] = []
        self._thread = Thread(target=self._serve, args=(answers,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(60)

    def _serve(self, answers: list[Answer]) -> None:
        for answer in answers:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self.asked.append(_read(connection))
                connection.sendall(answer(self.asked[-1]))


def _read(connection: socket.socket) -> Asked:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    asked = Asked(head.decode(), body)
    length = int(asked.header("content-length") or 0)
    while len(body) < length:
        body += connection.recv(65536)
    return Asked(asked.head, body)


@contextmanager
def answering(*answers: Answer | bytes) -> Iterator[ScriptedServer]:
    """Run a server that sends these answers in this order, one per connection."""
    server = ScriptedServer([_always(answer) if isinstance(answer, bytes) else answer for answer in answers])
    try:
        yield server
    finally:
        server.close()


def _always(data: bytes) -> Answer:
    return lambda _: data
