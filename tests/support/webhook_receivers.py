"""Receivers of webhooks: one in memory, and a real HTTP server."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Condition, Thread
from typing import Any, NamedTuple

from batchline.domain.webhooks import Message, SendResult


class MemorySender:
    """A sender that keeps the messages. ``answer`` decides what comes of each."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.answer: Callable[[Message], SendResult] = lambda _: SendResult(status=200)

    async def send(self, message: Message) -> SendResult:
        self.messages.append(message)
        return self.answer(message)

    @property
    def events(self) -> list[Any]:
        return [json.loads(message.body) for message in self.messages]


class Received(NamedTuple):
    headers: dict[str, str]
    body: bytes

    @property
    def event(self) -> Any:
        return json.loads(self.body)


class Receiver:
    """An HTTP server that keeps what it receives and answers with ``status``."""

    def __init__(self) -> None:
        self.status = 200
        self.headers: dict[str, str] = {}
        self.received: list[Received] = []
        self.arrived = Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                with receiver.arrived:
                    receiver.received.append(Received(headers, body))
                    receiver.arrived.notify_all()
                self.send_response(receiver.status)
                for name, value in receiver.headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook"
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def wait_for(self, condition: Callable[[list[Received]], bool], *, seconds: float = 120) -> list[Received]:
        """Wait until a condition holds for what was received. The time only ends a test that hangs."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: condition(self.received), timeout=seconds), self.received
            return list(self.received)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def running_receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    try:
        yield receiver
    finally:
        receiver.close()
