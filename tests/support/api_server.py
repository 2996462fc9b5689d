"""Runs the real API on a real socket, with SQLite and a folder, in an event loop of its own thread."""

import asyncio
import json
import math
import socket
import sqlite3
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPMessage, HTTPResponse
from pathlib import Path
from threading import Event, Thread
from typing import Any, TypeVar
from uuid import uuid4

import uvloop

from batchline.api.server import Server, build
from batchline.api.services import ApiServices
from batchline.console.routes import console_routes
from batchline.domain import ids
from batchline.domain.money import nano
from batchline.domain.records import UsageEntry
from batchline.objects.local import LocalObjects
from batchline.pipeline.validation_pool import ValidationPool
from batchline.ports import ClockState, NewKey
from batchline.settings import Settings
from batchline.store.sqlite.database import SqliteDatabase
from batchline.store.store import SqlStore
from batchline.system import SystemClock, SystemRandom, ThreadPool
from batchline.upstream.http import HttpUpstream
from batchline.upstream.mock.script import Script
from batchline.upstream.mock.server import serve_mock
from tests.support.api_services import compose, open_upstreams

T = TypeVar("T")
Wrap = Callable[[Any], Any]
TIMEOUT_SECONDS = 60
"""Ends a test that hangs; no test depends on the value."""

CHAT = "/v1/chat/completions"
LINE = (
    b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions",'
    b'"body":{"model":"m","messages":[{"role":"user","content":"hi"}]}}\n'
)


class ShiftedClock(SystemClock):
    """The system clock, set forward by ``ahead`` seconds."""

    ahead = 0.0

    state = ClockState()

    def now(self) -> float:
        return super().now() + self.ahead

    def due(self) -> float:
        return self.now()

    async def check(self) -> ClockState:
        return self.state


class Faulty:
    """Wraps a part and lets some of its calls fail."""

    def __init__(self, part: Any, **faults: Exception) -> None:
        self._part = part
        self.faults = faults

    def __getattr__(self, name: str) -> Any:
        if name not in self.faults:
            return getattr(self._part, name)

        async def fail(*_: object, **__: object) -> None:
            raise self.faults[name]

        return fail


class Counting:
    """Wraps a part and remembers which of its methods were used."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.calls.append(name)
        return getattr(self._part, name)


class BlockedRead:
    """Wraps a store and blocks one of its reads until ``release`` is called."""

    def __init__(self, store: Any, name: str) -> None:
        self._store, self._name = store, name
        self.entered = Event()
        self._released = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return self._read if name == self._name else getattr(self._store, name)

    async def release(self) -> None:
        self._released.set()

    async def _read(self, *args: object, **options: object) -> Any:
        self.entered.set()
        await self._released.wait()
        return await getattr(self._store, self._name)(*args, **options)


class Held:
    """Wraps a validator and blocks it until ``drop`` is called."""

    def __init__(self, validator: Any) -> None:
        self._validator = validator
        self.entered = Event()
        self._released = asyncio.Event()

    async def validate(self, **options: Any) -> Any:
        self.entered.set()
        await self._released.wait()
        return await self._validator.validate(**options)

    async def drop(self) -> None:
        self._released.set()


@dataclass(frozen=True)
class Account:
    key: str
    key_id: str
    project_id: str
    organization_id: str = ""

    @property
    def headers(self) -> dict[str, str]:
        return {"x-api-key": self.key, "x-project-id": self.project_id}


@dataclass(frozen=True)
class Reply:
    status: int
    headers: HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """The error of the envelope, which must be complete and have no other fields."""
        assert set(self.json) == {"error"}
        error = self.json["error"]
        assert set(error) - {"line"} == {"message", "type", "code", "param"}
        assert isinstance(error["message"], str)
        assert isinstance(error["type"], str)
        return error


def unwrapped(part: Any) -> Any:
    return part


class Api:
    """A running API. Use as a context manager; the parts may be wrapped, to break or to block them.

    Its upstream is the scripted one, unless the settings name another or ``mocked`` is false. It has no worker.
    """

    def __init__(
        self,
        folder: Path,
        *,
        wrap_store: Wrap = unwrapped,
        wrap_objects: Wrap = unwrapped,
        wrap_validator: Wrap = unwrapped,
        mocked: bool = True,
        has_console: bool = False,
        **settings: Any,
    ) -> None:
        self.folder = folder
        self._chosen = settings
        self._has_console = has_console
        self._mocked = mocked and "upstream_url" not in settings
        self.script = Script()
        self.used: list[str] = []
        self.clock = ShiftedClock()
        self._wraps = wrap_store, wrap_objects, wrap_validator
        self._ready: Future[None] = Future()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Api":
        self._thread.start()
        self._ready.result(TIMEOUT_SECONDS)
        self.account = self.new_account("first")
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self.stop()
        self.join()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self.server.stop)

    def join(self) -> None:
        self._thread.join(TIMEOUT_SECONDS)
        assert not self._thread.is_alive()

    def await_(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_SECONDS)

    def new_account(self, project: str, *, organization: str | None = None, **more: Any) -> Account:
        key, key_id = ids.api_key(SystemRandom().bytes(24)), f"key_{uuid4().hex}"
        new = NewKey(
            key_id=key_id,
            digest=ids.key_digest(key),
            hint="bl-…",
            project=project,
            project_id=str(uuid4()),
            organization=organization or project,
            organization_id=str(uuid4()),
            at=1,
            **more,
        )
        owner = self.await_(self.store.create_key(new))
        return Account(key=key, key_id=key_id, project_id=owner.project_id, organization_id=owner.organization_id)

    def set_funds(self, funds: int, *, account: Account | None = None) -> None:
        """Set the funds of an organization to so many nano-units of credits."""
        organization_id = (account or self.account).organization_id
        assert self.await_(self.store.set_funds(organization_id, balance=0, credits=funds, at=1))

    def funds(self, account: Account | None = None) -> int:
        found = [
            each
            for each in self.await_(self.store.organizations())
            if each.id == (account or self.account).organization_id
        ]
        return found[0].balance + found[0].credits

    def usage(self, account: Account | None = None) -> list[UsageEntry]:
        project_id = (account or self.account).project_id
        return self.await_(self.store.usage(since=0, until=2**40, project_id=project_id))

    def post(self, path: str, body: Any, *, account: Account | None = None) -> Reply:
        return self.call("POST", path, body=json.dumps(body).encode(), account=account)

    def call(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        account: Account | None = None,
        anonymous: bool = False,
    ) -> Reply:
        credentials = {} if anonymous else (account or self.account).headers
        connection = HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request(method, path, body=body, headers={**credentials, **(headers or {})})
            response = connection.getresponse()
            return Reply(response.status, response.headers, response.read())
        finally:
            connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_SECONDS)

    def head(self, start: str, *lines: str) -> bytes:
        """Return the head of a request with credentials, for a test that writes to the socket itself."""
        own = [f"{name}: {value}" for name, value in self.account.headers.items()]
        return "\r\n".join([f"{start} HTTP/1.1", "host: test", *own, *lines, "", ""]).encode()

    def upload(self, data: bytes = LINE, *, account: Account | None = None) -> Reply:
        return self.send_form(field("purpose", "batch"), file_part(data), account=account)

    def send_form(self, *parts: bytes, account: Account | None = None) -> Reply:
        return self.call("POST", "/v1/files", body=form(*parts), headers=FORM, account=account)

    def create(self, headers: Mapping[str, str] | None = None, /, **body: Any) -> Reply:
        return self.call("POST", "/v1/batches", body=json.dumps(body).encode(), headers=headers)

    def ask(self, sql: str, *values: object) -> object:
        """Return the first value that a query finds in the database."""
        with closing(sqlite3.connect(self.folder / "test.sqlite")) as database:
            return database.execute(sql, values).fetchone()[0]

    def change(self, sql: str, *values: object) -> None:
        """Change rows of the database."""
        with closing(sqlite3.connect(self.folder / "test.sqlite", timeout=TIMEOUT_SECONDS)) as database, database:
            database.execute(sql, values)

    def uploading(self) -> int:
        """Return how many uploads are neither finished nor abandoned."""
        return int(str(self.ask("SELECT count(*) FROM files WHERE state = 'uploading'")))

    def connections(self) -> int:
        return len(self.server._uvicorn.server_state.connections)

    def requests_in_flight(self) -> int:
        """Return how many requests the server still works on, whether or not their clients wait."""
        return len(self.server._uvicorn.server_state.tasks)

    async def _turn(self) -> None:
        """Do nothing: once this has run, everything that was scheduled before it has run too."""

    def run_pending(self) -> None:
        self.await_(self._turn())

    def stored(self) -> list[str]:
        """Return every file in the folder of objects, complete or half-written."""
        return sorted(str(path.relative_to(self.folder)) for path in self._objects_root.rglob("*") if path.is_file())

    @property
    def _objects_root(self) -> Path:
        return self.folder / "objects"

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                runner.run(self._serve())
            except BaseException as failure:
                if self._ready.done():
                    raise
                self._ready.set_exception(failure)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with AsyncExitStack() as parts:
            services = self._compose(parts, await self._open_upstreams(parts))
            self.services, self.store = services, services.store
            credits = nano(self.settings.free_credits) if self.settings.metering else None
            await self.store.start_metering(credits, at=1)
            sock = socket.create_server(("127.0.0.1", 0))
            self.port = sock.getsockname()[1]
            self.server = Server(
                build(services, console=console_routes(services) if self._has_console else ()),
                settings=self.settings,
                metrics=services.metrics,
                random=services.random,
                sock=sock,
                max_connections=self.settings.max_connections or math.inf,
            )
            self._ready.set_result(None)
            await self.server.serve()

    async def _open_upstreams(self, parts: AsyncExitStack) -> dict[str, HttpUpstream]:
        chosen = dict(self._chosen)
        if self._mocked:
            mock = await serve_mock(host="127.0.0.1", port=0, script=self.script)
            parts.push_async_callback(mock.close)
            chosen["upstream_url"] = mock.base_url
        self.settings = Settings(data_dir=self.folder, **chosen)
        upstreams = open_upstreams(self.settings, self.clock)
        for upstream in upstreams.values():
            parts.push_async_callback(upstream.close)
        return upstreams

    def _compose(self, parts: AsyncExitStack, upstreams: dict[str, HttpUpstream]) -> ApiServices:
        pools = [ThreadPool(count, name="test") for count in (1, 1, 4)]
        writer, reader, disk = pools
        database = SqliteDatabase(self.folder / "test.sqlite", clock=self.clock, writer=writer, reader=reader)
        parts.callback(database.close)
        for pool in pools:
            parts.callback(pool.close)
        children = ValidationPool()
        parts.callback(children.close)
        real = SqlStore(database), LocalObjects(self._objects_root, disk, SystemRandom()), children
        store, objects, validator = (wrap(part) for wrap, part in zip(self._wraps, real, strict=True))
        return compose(
            self.settings,
            store=store,
            objects=objects,
            validator=validator,
            upstreams=upstreams,
            clock=self.clock,
            on_key_used=self.used.append,
        )


BOUNDARY = "line-of-the-test"
FORM = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}


def field(name: str, value: str) -> bytes:
    return f'content-disposition: form-data; name="{name}"\r\n\r\n{value}'.encode()


def file_part(data: bytes, *, disposition: str = 'form-data; name="file"; filename="in.jsonl"') -> bytes:
    return f"content-disposition: {disposition}\r\ncontent-type: application/jsonl\r\n\r\n".encode() + data


def form(*parts: bytes) -> bytes:
    opening = f"--{BOUNDARY}\r\n".encode()
    return b"".join(opening + part + b"\r\n" for part in parts) + f"--{BOUNDARY}--\r\n".encode()


def wait_until(holds: Callable[[], bool]) -> None:
    """Poll until a condition holds, and fail if it never does."""
    give_up = time.monotonic() + TIMEOUT_SECONDS
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.002)


def read_reply(sock: socket.socket) -> Reply:
    """Read one answer from a socket, and leave the bytes after it there."""
    response = HTTPResponse(sock)
    response.begin()
    return Reply(response.status, response.headers, response.read())


def read_to_end(sock: socket.socket) -> bytes:
    received = b""
    while chunk := sock.recv(65536):
        received += chunk
    return received
