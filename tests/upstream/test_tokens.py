"""Counting tokens by the upstream's own routes (D6): a real llama.cpp, servers that behave as the documents of vLLM
and SGLang say, and the estimate where there is no route."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from batchline.domain.outcomes import Retryable, classify_reply
from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.upstream.tokens import UpstreamTokens
from tests.support.raw_server import ManualClock, Peer, answer, client, serving

TEN_MINUTES = 600
CHAT = "/v1/chat/completions"
Response = tuple[int, Any]
Responder = Callable[[str, Any], Response]
"""From the path and the JSON of a request to the status and the JSON of the answer."""

NOT_FOUND: Response = (404, {"detail": "Not Found"})
PARTS = [{"type": "text", "text": "What is"}, {"type": "text", "text": " this?"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def chat(*messages: dict[str, Any], model: str = "m", **more: Any) -> bytes:
    return json.dumps({"model": model, "messages": messages, "max_tokens": 1, **more}).encode()


HELLO = chat(user("Hello there!"))
ESTIMATE = 3 + 4
"""Of HELLO: twelve bytes, one message."""


class AnyUpstream:
    """A server over real sockets, and what it was asked."""

    def __init__(self, respond: Responder) -> None:
        self.respond = respond
        self.requests: list[tuple[str, Any]] = []
        self.clock = ManualClock()

    @property
    def paths(self) -> Counter[str]:
        return Counter(path for path, _ in self.requests)

    async def behave(self, peer: Peer) -> None:
        while True:
            head, _, body = (await peer.request()).partition(b"\r\n\r\n")
            path, document = head.split()[1].decode(), json.loads(body)
            self.requests.append((path, document))
            status, told = self.respond(path, document)
            await peer.send(answer(json.dumps(told).encode(), status=f"{status} Status"))

    @asynccontextmanager
    async def tokens(self) -> AsyncIterator[UpstreamTokens]:
        async with serving(self.behave) as wire, client(wire.port) as upstream:
            yield UpstreamTokens(upstream, clock=self.clock)


def counts(site: AnyUpstream, *bodies: bytes) -> list[int | Reply]:
    async def count_all() -> list[int | Reply]:
        async with site.tokens() as tokens:
            return [await tokens.count(body) for body in bodies]

    return asyncio.run(count_all())


def vllm(path: str, document: Any) -> Response:
    """As vLLM documents POST /tokenize for chats: fields it does not know are ignored. A word is a token here."""
    if path != "/tokenize":
        return NOT_FOUND
    if document["model"] != "m":
        return 404, {"error": {"message": f"The model `{document['model']}` does not exist.", "code": 404}}
    if not all(isinstance(message.get("content"), str) for message in document["messages"]):
        return 400, {"error": {"message": "1 validation error", "type": "BadRequestError", "code": 400}}
    words = [word for message in document["messages"] for word in message["content"].split()]
    return 200, {"count": len(words) + 100, "max_model_len": 4096, "tokens": [1] * (len(words) + 100)}


def old_sglang(path: str, document: Any) -> Response:
    """As SGLang was before its /tokenize took messages: a prompt is required."""
    if path != "/tokenize":
        return NOT_FOUND
    return (
        (200, {"tokens": [1], "count": 1, "max_model_len": -1}) if "prompt" in document else (400, {"object": "error"})
    )


def llama(path: str, document: Any) -> Response:
    """As llama.cpp answers; a letter is a token here."""
    match path:
        case "/apply-template":
            return 200, {"prompt": "".join(message["content"] for message in document["messages"])}
        case "/tokenize":
            return 200, {"tokens": [1] * len(document.get("content", ""))}
    return NOT_FOUND


@pytest.mark.parametrize(
    "body",
    [
        chat(user("Hello there!")),
        chat({"role": "system", "content": "You are terse."}, user("Why?")),
        chat(user("Hi"), {"role": "assistant", "content": "Hello!"}, user("And now?")),
        chat(user("Γειά σου, κόσμε! こんにちは 👩‍👩‍👧‍👦 e\u0301 \u2028")),
        chat(user("<|im_end|>\n<|im_start|>system\n<|endoftext|></s>")),
        chat(user(PARTS)),
        chat(user("Complete this"), {"role": "assistant", "content": "Sure, I"}),
        chat(user("Hi"), tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        chat(user("lorem ipsum dolor " * 20 + "\n" * 50 + "\t1234567890")),
    ],
    ids=["plain", "system", "turns", "scripts", "special", "parts", "prefill", "tools", "long"],
)
def test_the_count_is_what_a_real_server_reads(llama_url: str, body: bytes) -> None:
    """D6: as many tokens as llama.cpp then reports as prompt_tokens."""

    async def count_and_ask() -> tuple[int | Reply, Any]:
        async with client(0, url=llama_url, request_timeout=120) as upstream:
            counted = await UpstreamTokens(upstream, clock=ManualClock()).count(body)
            reply = await upstream.post(CHAT, body)
            assert isinstance(reply, Answer)
            return counted, json.loads(reply.body)

    counted, told = asyncio.run(count_and_ask())
    assert counted == told["usage"]["prompt_tokens"]


def test_vllm_counts_the_chat_as_it_will_be_sent() -> None:
    """D6: messages, tools and the arguments of the template are all in the count; one request for each."""
    site = AnyUpstream(vllm)
    body = chat(user("one two three"), tools=[{"type": "function"}], chat_template_kwargs={"enable_thinking": False})
    assert counts(site, body, HELLO) == [103, 102]
    assert [document for _, document in site.requests[1:]] == [json.loads(body), json.loads(HELLO)]


@pytest.mark.rule("D6", "Tokens are counted as the server will read them.")
def test_llama_counts_the_rendered_prompt() -> None:
    """D6: special tokens of the template are parsed and those of the model added, as for a chat."""
    site = AnyUpstream(llama)
    assert counts(site, HELLO) == [12]
    assert site.requests[-2:] == [
        ("/apply-template", json.loads(HELLO)),
        ("/tokenize", {"content": "Hello there!", "add_special": True, "parse_special": True}),
    ]


@pytest.mark.parametrize("respond", [vllm, llama])
def test_what_a_server_is_gets_found_out_once(respond: Responder) -> None:
    """D6: and again after ten minutes, since another may stand in its place."""
    site = AnyUpstream(respond)

    async def count_again() -> list[int]:
        asked = []
        async with site.tokens() as tokens:
            for seconds in (0, TEN_MINUTES - 1, 1):
                site.clock.seconds += seconds
                before = len(site.requests)
                await tokens.count(HELLO)
                asked.append(len(site.requests) - before)
        return asked

    first, second, third = asyncio.run(count_again())
    assert second < first
    assert third == first


@pytest.mark.parametrize("status", [301, 401, 403, 404, 405, 422, 501])
def test_a_server_that_does_not_count_gets_an_estimate(status: int) -> None:
    """D6: it is asked for its routes once in ten minutes."""
    site = AnyUpstream(lambda _path, _document: (status, {}))
    assert counts(site, HELLO, HELLO, HELLO) == [ESTIMATE] * 3
    assert site.paths == {"/tokenize": 1, "/apply-template": 1}


def test_a_server_that_learns_to_count_is_noticed() -> None:
    """D6: after ten minutes the estimate gives way to real tokens."""
    site = AnyUpstream(lambda _path, _document: NOT_FOUND)

    async def upgrade() -> list[int | Reply]:
        async with site.tokens() as tokens:
            counted = [await tokens.count(HELLO)]
            site.respond = vllm
            for seconds in (TEN_MINUTES - 1, 1):
                site.clock.seconds += seconds
                counted.append(await tokens.count(HELLO))
        return counted

    assert asyncio.run(upgrade()) == [ESTIMATE, ESTIMATE, 102]


def test_a_server_that_takes_prompts_alone_gets_an_estimate() -> None:
    """D6: its 400 is no trouble, and it is not asked for every count."""
    site = AnyUpstream(old_sglang)
    assert counts(site, HELLO, HELLO) == [ESTIMATE] * 2
    assert len(site.requests) == 2


@pytest.mark.parametrize("told", ["<html>", {"tokens": []}, {"count": 0}, {"count": "7"}, {"count": [7]}, {}])
def test_an_answer_that_is_no_count_is_not_taken_for_one(told: Any) -> None:
    """D6: a page that answers every path, or a count of nothing, leads to the estimate."""
    assert counts(AnyUpstream(lambda _path, _document: (200, told)), HELLO) == [ESTIMATE]


def test_a_chat_that_the_counter_dislikes_is_estimated_alone() -> None:
    """D6: the next one is counted again."""
    assert counts(AnyUpstream(vllm), HELLO, chat(user([*PARTS, IMAGE])), HELLO) == [102, 4 + 4, 102]


def test_one_model_that_is_not_counted_says_nothing_of_another() -> None:
    """D6: a server answers 404 for a model it does not know, too."""
    assert counts(AnyUpstream(vllm), chat(user("Hello there!"), model="unknown"), HELLO) == [ESTIMATE, 102]


@pytest.mark.rule("D6", "A server in trouble is never guessed about.")
@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("troubled", ["/tokenize", "/apply-template"])
def test_a_server_in_trouble_is_never_guessed_about(status: int, troubled: str) -> None:
    """D6, D3: its answer is handed on, so that the line is tried again; and nothing is remembered of it."""
    in_trouble = True

    def respond(path: str, document: Any) -> Response:
        return (status, {}) if in_trouble and path == troubled else llama(path, document)

    site = AnyUpstream(respond)

    async def recover() -> tuple[int | Reply, int | Reply]:
        nonlocal in_trouble
        async with site.tokens() as tokens:
            told = await tokens.count(HELLO)
            in_trouble = False
            return told, await tokens.count(HELLO)

    told, counted = asyncio.run(recover())
    assert isinstance(told, Answer)
    assert told.status == status
    assert isinstance(classify_reply(told, endpoint=CHAT), Retryable)
    assert counted == 12


def test_trouble_in_the_middle_of_counting_is_handed_on() -> None:
    """D6: also at the second request of llama.cpp's two, once its routes are known."""
    site = AnyUpstream(
        lambda path, document: (500, {}) if document.get("content") == "Hello there!" else llama(path, document)
    )
    (told,) = counts(site, HELLO)
    assert isinstance(told, Answer)
    assert told.status == 500


def test_a_server_that_is_not_there_is_a_fault() -> None:
    """D6, D3: a refused connection comes back as what it is."""

    async def count_nowhere() -> int | Reply:
        async with serving(AnyUpstream(vllm).behave) as wire:
            port = wire.port
        async with client(port) as upstream:
            return await UpstreamTokens(upstream, clock=ManualClock()).count(HELLO)

    fault = asyncio.run(count_nowhere())
    assert isinstance(fault, Fault)
    assert fault.kind is FaultKind.REFUSED


@pytest.mark.parametrize(
    ("messages", "tokens"),
    [
        ([user("")], 4),
        ([user("1234")], 1 + 4),
        ([user("12345")], 2 + 4),
        ([user("123"), user("123")], 2 + 8),
        ([user("é" * 4)], 2 + 4),
        ([user("\ud83d\ude00")], 1 + 4),
        ([user([*PARTS, IMAGE])], 4 + 4),
        ([user("1234"), {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}], 1 + 8),
        ([user("1234"), user([{"type": "text", "text": None}]), user(7), user([7])], 1 + 16),
    ],
)
def test_the_estimate(messages: list[dict[str, Any]], tokens: int) -> None:
    """D6: a token for every four bytes of UTF-8 of all texts, rounded up once, and four for each message."""
    assert counts(AnyUpstream(lambda _path, _document: NOT_FOUND), chat(*messages)) == [tokens]
