"""A proxy between a run and its server, in which a test can inject faults."""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import NamedTuple

from tests.support.service import PATIENCE, Service


class Exchange(NamedTuple):
    """A request, and its answer once the server has sent one."""

    method: str
    path: str
    headers: dict[str, str]
    status: int = 0
    body: bytes = b""

    @property
    def step(self) -> str:
        """The step of a run that sends this request."""
        if self.method == "POST":
            return "upload" if self.path.endswith("/files") else "create"
        if self.path.endswith("/healthz"):
            return "probe"
        return "download" if self.path.endswith("/content") else "poll"


class Broken(Exception):
    """Raised by a hook of a test: close the connection without an answer."""


class Instead(Exception):
    """Raised by a hook of a test: send this answer instead."""

    def __init__(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        super().__init__(status)
        self.status, self.body, self.headers = status, body, headers or {}


Hook = Callable[[Exchange], None]


def _let_pass(_: Exchange) -> None:
    pass


class Between:
    """Forwards every request to a service, and calls a hook of the test before and after."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.before: Hook = _let_pass
        self.after: Hook = _let_pass
        self.cut_download_at: int | None = None
        """Number of bytes of the next download after which the connection is closed."""

        self.seen: list[Exchange] = []
        between = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                between._pass(self)

            def do_POST(self) -> None:
                between._pass(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(PATIENCE)

    def steps(self) -> list[str]:
        return [exchange.step for exchange in self.seen]

    def _pass(self, handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = True
        headers = {name.lower(): value for name, value in handler.headers.items()}
        body = handler.rfile.read(int(headers.get("content-length", 0)))
        exchange = Exchange(handler.command, handler.path, headers)
        self.seen.append(exchange)
        try:
            self.before(exchange)
            status, answer, answer_headers = self._forward(exchange, body)
            self.after(exchange._replace(status=status, body=answer))
        except Instead as instead:
            status, answer, answer_headers = instead.status, instead.body, instead.headers
        except (Broken, OSError):
            return
        self._send(handler, exchange, status, answer, answer_headers)

    def _forward(self, exchange: Exchange, body: bytes) -> tuple[int, bytes, dict[str, str]]:
        with closing(HTTPConnection("127.0.0.1", self.service.port, timeout=PATIENCE)) as connection:
            connection.request(exchange.method, exchange.path, body=body, headers=exchange.headers)
            response = connection.getresponse()
            kept = ("x-batch-id", "retry-after", "content-range")
            return (
                response.status,
                response.read(),
                {name: response.headers[name] for name in kept if name in response.headers},
            )

    def _send(
        self, handler: BaseHTTPRequestHandler, exchange: Exchange, status: int, answer: bytes, headers: dict[str, str]
    ) -> None:
        handler.send_response(status)
        for name, value in (headers | {"content-length": str(len(answer)), "connection": "close"}).items():
            handler.send_header(name, value)
        handler.end_headers()
        if exchange.step == "download" and self.cut_download_at is not None:
            answer, self.cut_download_at = answer[: self.cut_download_at], None
        handler.wfile.write(answer)


@contextmanager
def between(service: Service) -> Iterator[Between]:
    """Run a proxy in front of a service."""
    proxy = Between(service)
    try:
        yield proxy
    finally:
        proxy.close()
