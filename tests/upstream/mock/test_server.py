"""The mock server: what it counts, how its plan is changed, and how it answers invalid requests."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from batchline.upstream.mock.script import Plan, Script
from batchline.upstream.mock.server import MAX_BODY_BYTES, MockServer, serve_mock


class Caller:
    """A minimal client: it writes bytes and reads one answer at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> tuple[int, Any]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return int(head.split()[1]), json.loads(await self._reader.readexactly(length))

    async def ask(self, method: str, path: str, document: object = None) -> tuple[int, Any]:
        self.send(request(method, path, document))
        return await self.answer()

    async def ended(self) -> bool:
        return await self._reader.read() == b""

    async def leave(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


def request(method: str, path: str, document: object = None, *fields: str) -> bytes:
    body = b"" if document is None else json.dumps(document).encode()
    lines = [f"{method} {path} HTTP/1.1", "Host: mock", *fields, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


def chat(prompt: str) -> dict[str, object]:
    return {"model": "m", "messages": [{"role": "user", "content": prompt}]}


def post(prompt: str, *fields: str) -> bytes:
    return request("POST", "/v1/chat/completions", chat(prompt), *fields)


@asynccontextmanager
async def calling(server: MockServer) -> AsyncIterator[Caller]:
    caller = Caller(*await asyncio.open_connection("127.0.0.1", server.port))
    try:
        yield caller
    finally:
        await caller.leave()


def play(scene: Callable[[MockServer, Caller], Awaitable[None]], plan: Plan | None = None) -> None:
    async def main() -> None:
        server = await serve_mock(host="127.0.0.1", port=0, script=Script(plan))
        try:
            async with calling(server) as caller:
                await scene(server, caller)
        finally:
            await server.close()

    uvloop.run(main())


async def stats(server: MockServer) -> dict[str, Any]:
    async with calling(server) as caller:
        status, document = await caller.ask("GET", "/stats")
        assert status == 200
        assert isinstance(document, dict)
        return document


def test_it_counts_requests() -> None:
    """Tests of exactly-once need to know how many requests were repeated."""

    async def scene(server: MockServer, caller: Caller) -> None:
        for prompt in ("a", "a", "a", "b", "b", "c", "[[status=503]]"):
            caller.send(post(prompt))
            await caller.answer()
        assert await stats(server) == {
            "requests": 7,
            "in_flight": 0,
            "peak_in_flight": 1,
            "distinct": 4,
            "repeated": 2,
            "requests_by_status": {"200": 6, "503": 1},
        }

    play(scene)


def test_it_counts_requests_in_flight() -> None:
    """Tests of concurrency limits need the peak; a client that disconnects is no longer in flight."""

    async def scene(server: MockServer, first: Caller) -> None:
        async with calling(server) as second:
            for caller in (first, second):
                caller.send(post("[[hang]]"))
            while (await stats(server))["in_flight"] < 2:
                """Both requests are on their way."""
        while (seen := await stats(server))["in_flight"] > 1:
            """The second is leaving."""
        assert (seen["in_flight"], seen["peak_in_flight"]) == (1, 2)
        assert seen["requests_by_status"] == {"left": 1}
        async with calling(server) as third:
            await third.ask("POST", "/script", {})
        assert (await stats(server))["peak_in_flight"] == 1, "a new plan begins a new count"

    play(scene)


def test_its_plan_can_be_changed_while_it_runs() -> None:
    """Each new plan replaces the whole old one; an invalid plan changes nothing."""

    async def scene(server: MockServer, caller: Caller) -> None:
        assert (await caller.ask("POST", "/v1/chat/completions", chat("a")))[0] == 200
        status, plan = await caller.ask("POST", "/script", {"status": {"503": 100}})
        assert (status, plan["status"]) == (200, {"503": 100})
        assert (await caller.ask("POST", "/v1/chat/completions", chat("a")))[0] == 503
        assert (await caller.ask("POST", "/script", {"status": {"503": 101}}))[0] == 400
        assert (await caller.ask("POST", "/script", {"no such": 1}))[0] == 400
        assert (await caller.ask("POST", "/v1/chat/completions", chat("a")))[0] == 503
        assert (await caller.ask("POST", "/script", {}))[0] == 200
        assert (await caller.ask("POST", "/v1/chat/completions", chat("a")))[0] == 200

    play(scene)


def test_requests_on_one_connection_are_answered_in_order() -> None:
    """With keep-alive and pipelining, a late first answer still comes first."""

    async def scene(server: MockServer, caller: Caller) -> None:
        prompts = ["first [[delay=0.02]]", "second", "third"]
        caller.send(b"".join(post(prompt) for prompt in prompts))
        for prompt in prompts:
            _, document = await caller.answer()
            assert document["choices"][0]["message"]["content"] == f"scripted answer to: {prompt}"

    play(scene)


def test_a_client_that_wants_to_close_is_closed() -> None:
    async def scene(server: MockServer, caller: Caller) -> None:
        caller.send(post("a", "Connection: close"))
        assert (await caller.answer())[0] == 200
        assert await caller.ended()

    play(scene)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: mock\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1) + b"x" * (MAX_BODY_BYTES + 1), 413),
    ],
    ids=["nonsense", "upgrade", "too large"],
)
def test_invalid_requests_are_refused(data: bytes, status: int) -> None:
    """Bodies have a maximum size, and the connection is closed after an invalid request."""

    async def scene(server: MockServer, caller: Caller) -> None:
        caller.send(data)
        assert (await caller.answer())[0] == status

    play(scene)


@pytest.mark.parametrize(("method", "path"), [("GET", "/"), ("GET", "/v1/chat/completions"), ("PUT", "/script")])
def test_other_routes_are_not_found(method: str, path: str) -> None:
    async def scene(server: MockServer, caller: Caller) -> None:
        assert (await caller.ask(method, path))[0] == 404

    play(scene)
