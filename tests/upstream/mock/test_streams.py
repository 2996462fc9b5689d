"""The mock server's streams over the wire, and its answers as the official client reads them."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from openai import AsyncOpenAI

from batchline.domain.errors import StreamBroken
from batchline.domain.replies import Answer, Fault, Reply
from batchline.system import SystemClock
from batchline.upstream.http import HttpUpstream
from batchline.upstream.mock.script import Plan, Script, ScriptedOutcome
from batchline.upstream.mock.server import MockServer, serve_mock
from batchline.upstream.streaming import EventStream

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
STREAMED = [CHAT, RESPONSES]
TEXT_ROUTES = ["/summary", "/usecase/classify/iab", "/gliner"]


def chat(prompt: str, **fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": prompt}], **fields}).encode()


def asking(path: str, prompt: str, *, stream: bool = True) -> bytes:
    if path == CHAT:
        return chat(prompt, stream=stream)
    return json.dumps({"model": "m", "input": prompt, "stream": stream}).encode()


def decide(path: str, body: bytes, *, plan: Plan | None = None) -> ScriptedOutcome:
    return Script(plan).decide(path, body)


def documents(events: bytes) -> list[Any]:
    """Return the JSON of every event except the final [DONE] of a chat."""
    lines = (line.removeprefix(b"data: ") for line in events.split(b"\n") if line.startswith(b"data: "))
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def answered(answer: EventStream | Reply) -> Answer:
    assert isinstance(answer, Answer), answer
    return answer


def streaming(answer: EventStream | Reply) -> EventStream:
    assert isinstance(answer, EventStream), answer
    return answer


@asynccontextmanager
async def upstream_of(server: MockServer) -> AsyncIterator[HttpUpstream]:
    upstream = HttpUpstream(
        server.base_url,
        api_key=None,
        connect_timeout=10,
        request_timeout=30,
        max_answer_bytes=100_000,
        clock=SystemClock(),
    )
    try:
        yield upstream
    finally:
        await upstream.close()


def play(scene: Callable[[MockServer, HttpUpstream], Awaitable[None]]) -> None:
    async def main() -> None:
        server = await serve_mock(host="127.0.0.1", port=0, script=Script())
        try:
            async with upstream_of(server) as upstream:
                await scene(server, upstream)
        finally:
            await server.close()

    uvloop.run(main())


async def stats(upstream: HttpUpstream) -> dict[str, Any]:
    document = json.loads(answered(await upstream.get("/stats")).body)
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("path", STREAMED)
def test_a_stream_comes_whole_over_the_wire(path: str) -> None:
    """E1: every event arrives, the connection serves the next request, and the stream counts as one request."""

    async def scene(server: MockServer, upstream: HttpUpstream) -> None:
        body = asking(path, "hello [[huge=500000]]")
        async with upstream.stream(path, body) as answer:
            stream = streaming(answer)
            assert b"".join([piece async for piece in stream]) == decide(path, body).body
            assert stream.request_id is not None
        assert answered(await upstream.post(CHAT, chat("a"))).status == 200
        seen = await stats(upstream)
        assert (seen["in_flight"], seen["requests_by_status"]) == (0, {"200": 2})
        assert len(server.connections) == 1

    play(scene)


def test_a_pause_is_made_before_every_event_but_the_first() -> None:
    """E2: a client can close a stream in the middle; until then it is in flight, after that it counts as "left"."""

    async def scene(_: MockServer, upstream: HttpUpstream) -> None:
        async with upstream.stream(CHAT, chat("[[pause=3600]]", stream=True)) as answer:
            (first,) = documents(await anext(streaming(answer)))
            assert first["choices"][0]["delta"]["role"] == "assistant"
            seen = await stats(upstream)
            assert (seen["in_flight"], seen["peak_in_flight"], seen["requests_by_status"]) == (1, 1, {})
        while (seen := await stats(upstream))["in_flight"]:
            """It is being left."""
        assert (seen["peak_in_flight"], seen["requests_by_status"]) == (1, {"left": 1})

    play(scene)


def test_a_paused_stream_comes_whole() -> None:
    """Also if the next request of the connection waits behind it."""

    async def scene(server: MockServer, _: HttpUpstream) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for prompt, stream in (("[[pause=0.001]]", True), ("after", False)):
            body = chat(prompt, stream=stream)
            writer.write(b"POST %b HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body))
        assert (await reader.readuntil(b"0\r\n\r\n")).count(b"\r\ndata: ") == 1 + 4 + 1 + 1
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert server.stats.peak_in_flight == 1
        writer.close()
        await writer.wait_closed()

    play(scene)


@pytest.mark.parametrize("path", STREAMED)
def test_a_cut_ends_a_stream_after_half_its_events(path: str) -> None:
    """E2: a stream that breaks in the middle."""

    async def scene(_: MockServer, upstream: HttpUpstream) -> None:
        body = asking(path, "hello [[cut]]")
        events = decide(path, body).events
        came: list[bytes] = []

        async def read(stream: EventStream) -> None:
            async for piece in stream:
                came.append(piece)  # noqa: PERF401

        async with upstream.stream(path, body) as answer:
            with pytest.raises(StreamBroken):
                await read(streaming(answer))
        assert b"".join(came) == b"".join(events[: len(events) // 2])
        assert came
        assert (await stats(upstream))["requests_by_status"] == {"cut": 1}

    play(scene)


@pytest.mark.parametrize("directive", ["drop", "status=429 retry-after=2"])
def test_a_stream_that_never_begins_is_a_reply(directive: str) -> None:
    async def scene(_: MockServer, upstream: HttpUpstream) -> None:
        async with upstream.stream(CHAT, chat(f"[[{directive}]]", stream=True)) as answer:
            if directive == "drop":
                assert isinstance(answer, Fault)
            else:
                assert (answered(answer).status, answered(answer).retry_after) == (429, 2)

    play(scene)


def test_one_model_is_listed() -> None:
    """E3: an operator's own tools may ask for the list."""

    async def scene(_: MockServer, upstream: HttpUpstream) -> None:
        document = json.loads(answered(await upstream.get("/v1/models")).body)
        assert document["object"] == "list"
        assert [(model["id"], model["object"]) for model in document["data"]] == [("scripted", "model")]

    play(scene)


def test_the_official_client_reads_it_all() -> None:
    """E1, E2: the official client accepts the shapes."""

    async def scene(server: MockServer, _: HttpUpstream) -> None:
        async with AsyncOpenAI(base_url=server.base_url, api_key="none", max_retries=0) as openai:
            chunks = [
                chunk
                async for chunk in await openai.chat.completions.create(
                    model="m",
                    messages=[{"role": "user", "content": "hello"}],
                    stream=True,
                    stream_options={"include_usage": True},
                )
            ]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
            assert text == "scripted answer to: hello"
            assert chunks[-1].usage is not None
            assert chunks[-1].usage.total_tokens == 5
            response = await openai.responses.create(model="m", input="hello")
            assert response.output_text == text
            events = [event async for event in await openai.responses.create(model="m", input="hello", stream=True)]
            assert events[-1].type == "response.completed"
            assert events[-1].response.output_text == text
            assert [model.id async for model in openai.models.list()] == ["scripted"]

    play(scene)
