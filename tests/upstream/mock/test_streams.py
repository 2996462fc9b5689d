"""The scripted upstream's synchronous routes: streams, responses and the rest, in shapes the official client reads."""

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
from batchline.domain.usage import Usage, reported_usage
from batchline.system import SystemClock
from batchline.upstream.http import HttpUpstream
from batchline.upstream.mock.script import Outcome, Plan, Script
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


def decide(path: str, body: bytes, *, plan: Plan | None = None) -> Outcome:
    return Script(plan).decide(path, body)


def documents(events: bytes) -> list[Any]:
    """The JSON of every event but the last word of a chat."""
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


@pytest.mark.parametrize("fields", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
def test_a_chat_is_streamed_in_openais_chunks(fields: dict[str, Any]) -> None:
    """E1: first the role, then one chunk a word, then why it ended, then the last word; nothing of usage."""
    outcome = decide(CHAT, chat("two  words\n", stream=True, **fields))
    assert (outcome.status, outcome.content_type) == (200, "text/event-stream")
    assert outcome.body.endswith(b"\n\ndata: [DONE]\n\n")
    chunks = documents(outcome.body)
    choices = [chunk.pop("choices") for chunk in chunks]
    assert [choice["delta"] for (choice,) in choices] == [
        {"role": "assistant", "content": "", "refusal": None},
        *({"content": word} for word in ("scripted", " answer", " to:", " two", "  words", "\n")),
        {},
    ]
    assert [choice["finish_reason"] for (choice,) in choices] == [None] * 7 + ["stop"]
    same = {
        "id": chunks[0]["id"],
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "m",
        "system_fingerprint": "fp_scripted",
    }
    assert chunks == [same] * 8


def test_usage_is_told_in_a_chunk_of_its_own_when_asked_for() -> None:
    """E2: what a stream is charged by."""
    body = chat("two words [[cached=1]]", stream=True, stream_options={"include_usage": True})
    *chunks, last = documents(decide(CHAT, body).body)
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    assert last["choices"] == []
    assert last["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 6,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


@pytest.mark.parametrize("fields", [{}, {"stream": False}, {"stream": None}])
def test_nothing_is_streamed_that_was_not_asked_for(fields: dict[str, Any]) -> None:
    outcome = decide(CHAT, chat("a", **fields))
    assert (outcome.events, outcome.content_type) == ((), "application/json")


@pytest.mark.parametrize("path", STREAMED)
@pytest.mark.parametrize(
    ("directive", "status", "kind"),
    [
        ("status=503", 503, "application/json"),
        ("error=context_length_exceeded", 400, "application/json"),
        ("html", 200, "text/html"),
        ("redirect", 307, "application/json"),
        ("status=204", 204, "application/json"),
        ("pause=-1", 400, "application/json"),
        ("cached=x", 400, "application/json"),
    ],
)
def test_what_is_no_success_is_not_streamed(path: str, directive: str, status: int, kind: str) -> None:
    """E2: errors are plain answers, also to those who asked for a stream."""
    outcome = decide(path, asking(path, f"[[{directive}]]"))
    assert (outcome.status, outcome.content_type, outcome.events) == (status, kind, ())


def test_a_response_has_openais_shape() -> None:
    """E2: the message, and usage in the words of responses."""
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "hello [[cached=3]]"}]},
    ]
    body = json.dumps({"model": "m", "input": messages}).encode()
    outcome = decide(RESPONSES, body)
    document = json.loads(outcome.body)
    assert document["id"].startswith("resp_")
    assert (document["object"], document["status"], document["model"]) == ("response", "completed", "m")
    (message,) = document["output"]
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["content"][0]["type"] == "output_text"
    assert message["content"][0]["text"] == "scripted answer to: hello [[cached=3]]"
    assert document["usage"] == {
        "input_tokens": 4,
        "input_tokens_details": {"cached_tokens": 3},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 9,
    }
    assert reported_usage(outcome.body) == Usage(input_tokens=4, cached_tokens=3, output_tokens=5)


def test_a_response_is_streamed_as_named_events() -> None:
    events = decide(RESPONSES, asking(RESPONSES, "hello")).events
    names = [event.partition(b"\n")[0].decode() for event in events]
    delta = "event: response.output_text.delta"
    assert names == ["event: response.created", *[delta] * 4, "event: response.completed"]
    told = documents(b"".join(events))
    assert [f"event: {document['type']}" for document in told] == names
    assert told[0]["response"]["usage"] is None
    last = told[-1]["response"]
    text = "".join(document["delta"] for document in told[1:-1])
    assert text == last["output"][0]["content"][0]["text"] == "scripted answer to: hello"
    assert (last["status"], last["usage"]["total_tokens"]) == ("completed", 5)


@pytest.mark.parametrize("path", TEXT_ROUTES)
def test_the_other_routes_take_a_text(path: str) -> None:
    """E2: a shape of its own that says what it is, usage in the words of chats, and directives in the text."""
    body = json.dumps({"text": "two words", "anything": {"else": 1}}).encode()
    outcome = decide(path, body)
    document = json.loads(outcome.body)
    assert document == {
        "id": document["id"],
        "object": "scripted.text",
        "result": "scripted answer to: two words",
        "usage": {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7},
    }
    assert decide(path, json.dumps({"text": "[[status=503]]"}).encode()).status == 503
    assert decide(path, b'{"model":"m"}').status == 400


def test_cached_tokens_are_reported_where_the_prompt_says_so() -> None:
    """D4: prices of cached input can be tried; a rate that draws a fault does not mind."""
    assert reported_usage(decide(CHAT, chat("a [[cached=2]]")).body).cached_tokens == 2
    assert reported_usage(decide(CHAT, chat("a [[cached=2]]"), plan=Plan(cut=100)).body).cached_tokens == 2
    assert reported_usage(decide(CHAT, chat("a")).body).cached_tokens == 0
    assert len(decide(CHAT, chat("a [[cached=2 huge=5000]]")).body) == 5000


@pytest.mark.parametrize("path", STREAMED)
def test_a_stream_comes_whole_over_the_wire(path: str) -> None:
    """E1: every event, and the connection serves the next request; in the numbers it is one request."""

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
    """E2: a stream can be left in the middle; it is in flight until then, and counted as left after."""

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
    """Also when the next request of the connection waits behind it."""

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


def test_the_models_are_one() -> None:
    """E3: the list an operator's own tools may ask for."""

    async def scene(_: MockServer, upstream: HttpUpstream) -> None:
        document = json.loads(answered(await upstream.get("/v1/models")).body)
        assert document["object"] == "list"
        assert [(model["id"], model["object"]) for model in document["data"]] == [("scripted", "model")]

    play(scene)


def test_the_official_client_reads_it_all() -> None:
    """E1, E2: the shapes are OpenAI's to those who know them best."""

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
