"""Calls the application without a socket, on the virtual time of a bench."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from batchline.api.request_context import client_state_of
from batchline.api.server import build
from batchline.domain.ids import key_digest
from batchline.domain.records import ALL_SCOPES
from batchline.ports import NewKey
from tests.support.engine_harness import Bench

Headers = Mapping[str, str]


class Call:
    """One request, and the part of its answer that was sent so far."""

    def __init__(self, app: Any, method: str, target: str, *, headers: Headers, body: bytes) -> None:
        path, _, query = target.partition("?")
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
            "state": {},
        }
        if body:
            self.scope["headers"].append((b"content-length", str(len(body)).encode()))
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False
        self._requested: list[bytes] = [body]
        self._gone = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(app(self.scope, self._receive, self._send))

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of the error."""
        return str(self.json["error"]["code"])

    async def end(self) -> "Call":
        """Wait until the answer is complete."""
        await self._task
        return self

    async def leave(self) -> None:
        """Disconnect, and wait until the application has noticed."""
        client_state_of(self.scope).disconnected = True
        self._gone.set()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _receive(self) -> dict[str, Any]:
        if self._requested:
            return {"type": "http.request", "body": self._requested.pop(), "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
        else:
            self.body += message["body"]
            self.complete = not message.get("more_body", False)


class Client:
    """A client with a key of a project."""

    def __init__(
        self, bench: Bench, *, project: str = "alpha", key: str = "bl-first", scopes: str = ALL_SCOPES
    ) -> None:
        self._bench, self._project, self._key, self._scopes = bench, project, key, scopes
        self._services: Any = None

    @property
    def key_id(self) -> str:
        return f"id of {self._key}"

    async def call(self, method: str, target: str, *, headers: Headers | None = None, body: object = None) -> Call:
        """Send a request and return it at once."""
        services = self._bench.engine.api_role.services
        if self._services is None:
            await self._create_key()
        if services is not self._services:
            self._services, self._app = services, build(services)
        own = {"authorization": f"Bearer {self._key}"}
        data = b"" if body is None else json.dumps(body).encode()
        return Call(self._app, method, target, headers=own | dict(headers or {}), body=data)

    async def get(self, target: str, **headers: str) -> Call:
        """Return the whole answer to a GET."""
        return await (await self.call("GET", target, headers=headers)).end()

    async def post(self, target: str, body: object = None, **headers: str) -> Call:
        """Return the whole answer to a POST."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await (await self.call("POST", target, headers=named, body=body)).end()

    async def _create_key(self) -> None:
        owner = await self._bench.owner(self._project)
        await self._bench.rows.create_key(
            NewKey(
                key_id=self.key_id,
                digest=key_digest(self._key),
                hint="",
                project=self._project,
                project_id=owner.project_id,
                organization=self._project,
                organization_id=owner.organization_id,
                at=0,
                scopes=self._scopes,
            )
        )
