"""Counting tokens with the upstream's own routes (D6).

The tests use a real llama.cpp, servers that behave as vLLM and SGLang are documented, and servers without a route.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest

from batchline.domain.chat import check_request
from batchline.domain.models import Catalog, Model
from batchline.domain.outcomes import Retryable, classify_reply
from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.system import SystemClock
from batchline.upstream.tokens import UpstreamTokens
from tests.support.raw_server import ManualClock, Peer, answer, client, serving

pytestmark = pytest.mark.anyio
TEN_MINUTES = 600
CHAT = "/v1/chat/completions"
Response = tuple[int, Any]
Responder = Callable[[str, Any], Response]
"""Takes the path and the JSON of a request, and returns the status and the JSON of the answer."""

NOT_FOUND: Response = (404, {"detail": "Not Found"})
PARTS = [{"type": "text", "text": "What is"}, {"type": "text", "text": " this?"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def chat(*messages: dict[str, Any], model: str = "m", **more: Any) -> bytes:
    return json.dumps({"model": model, "messages": messages, "max_tokens": 1, **more}).encode()


HELLO = chat(user("Hello there!"))
ESTIMATE = 3 + 4
"""The estimate for HELLO: twelve bytes, one message."""


class CountingServer:
    """A server over real sockets that keeps the requests it got."""

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
            status, content = self.respond(path, document)
            await peer.send(answer(json.dumps(content).encode(), status=f"{status} Status"))

    @asynccontextmanager
    async def tokens(self) -> AsyncIterator[UpstreamTokens]:
        async with serving(self.behave) as wire, client(wire.port) as upstream:
            yield UpstreamTokens(upstream, clock=self.clock)


async def counts(server: CountingServer, *bodies: bytes) -> list[int | Reply]:
    async with server.tokens() as tokens:
        return [await tokens.count(body) for body in bodies]


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
async def test_the_count_is_what_a_real_server_reads(llama_url: str, body: bytes) -> None:
    """D6: as many tokens as llama.cpp then reports as prompt_tokens."""
    async with client(0, url=llama_url, request_timeout=120) as upstream:
        counted = await UpstreamTokens(upstream, clock=ManualClock()).count(body)
        reply = await upstream.post(CHAT, body)
    assert isinstance(reply, Answer)
    assert counted == json.loads(reply.body)["usage"]["prompt_tokens"]


class NoRoutes:
    """An upstream that answers every route with 404, and at once."""

    async def post(self, path: str, body: bytes) -> Reply:
        return Answer(status=404, body=b"{}")


async def test_a_chat_as_deep_as_the_check_of_a_request_allows_is_estimated() -> None:
    """The messages are read again further down the stack, where less depth is left. An exception would end the call."""
    tokens, catalog, estimated = UpstreamTokens(NoRoutes(), clock=SystemClock()), Catalog(), 0
    for depth in range(800, 1000):
        body = b'{"model":"m","messages":[{"role":"user","content":"Hi","x":%b%b}]}' % (b"[" * depth, b"]" * depth)
        if isinstance(check_request(body, endpoint=CHAT, project_id="p", catalog=catalog), Model):
            assert isinstance(await tokens.count(body), int)
            estimated += 1
    assert estimated > 0


async def test_other_tasks_run_between_two_estimates() -> None:
    """A chat with very many messages takes long to estimate, and a few that are shortened would stop the process."""
    tokens, order = UpstreamTokens(NoRoutes(), clock=SystemClock()), list[str]()

    async def shorten() -> None:
        for _ in range(5):
            await tokens.count(HELLO)
            order.append("estimate")

    async def work() -> None:
        while order.count("estimate") < 10:
            order.append("other")
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as group:
        for task in (shorten(), shorten(), work()):
            group.create_task(task)
    assert ("estimate", "estimate") not in pairwise(order)


async def test_vllm_counts_the_chat_as_it_will_be_sent() -> None:
    """D6: messages, tools and the arguments of the template are all counted, with one request per chat."""
    server = CountingServer(vllm)
    body = chat(user("one two three"), tools=[{"type": "function"}], chat_template_kwargs={"enable_thinking": False})
    assert await counts(server, body, HELLO) == [103, 102]
    assert [document for _, document in server.requests[1:]] == [json.loads(body), json.loads(HELLO)]


@pytest.mark.rule("D6", "Tokens are counted as the server will read them.")
async def test_llama_counts_the_rendered_prompt() -> None:
    """D6: special tokens of the template are parsed and those of the model added, as for a chat."""
    server = CountingServer(llama)
    assert await counts(server, HELLO) == [12]
    assert server.requests[-2:] == [
        ("/apply-template", json.loads(HELLO)),
        ("/tokenize", {"content": "Hello there!", "add_special": True, "parse_special": True}),
    ]


@pytest.mark.parametrize("respond", [vllm, llama])
async def test_the_route_is_looked_for_once_in_ten_minutes(respond: Responder) -> None:
    """D6: it is looked for again then, because another server may have replaced the first."""
    server = CountingServer(respond)
    requests = []
    async with server.tokens() as tokens:
        for seconds in (0, TEN_MINUTES - 1, 1):
            server.clock.seconds += seconds
            before = len(server.requests)
            await tokens.count(HELLO)
            requests.append(len(server.requests) - before)
    first, second, third = requests
    assert second < first
    assert third == first


@pytest.mark.parametrize("status", [301, 401, 403, 404, 405, 422, 501])
async def test_a_server_that_does_not_count_gets_an_estimate(status: int) -> None:
    """D6: its routes are tried once in ten minutes."""
    server = CountingServer(lambda _path, _document: (status, {}))
    assert await counts(server, HELLO, HELLO, HELLO) == [ESTIMATE] * 3
    assert server.paths == {"/tokenize": 1, "/apply-template": 1}


async def test_a_server_that_learns_to_count_is_noticed() -> None:
    """D6: after ten minutes real counts replace the estimate."""
    server = CountingServer(lambda _path, _document: NOT_FOUND)
    async with server.tokens() as tokens:
        counted = [await tokens.count(HELLO)]
        server.respond = vllm
        for seconds in (TEN_MINUTES - 1, 1):
            server.clock.seconds += seconds
            counted.append(await tokens.count(HELLO))
    assert counted == [ESTIMATE, ESTIMATE, 102]


async def test_a_server_that_takes_prompts_alone_gets_an_estimate() -> None:
    """D6: its 400 does not count as a failure, and the route is not tried for every count."""
    server = CountingServer(old_sglang)
    assert await counts(server, HELLO, HELLO) == [ESTIMATE] * 2
    assert len(server.requests) == 2


@pytest.mark.parametrize("content", ["<html>", {"tokens": []}, {"count": 0}, {"count": "7"}, {"count": [7]}, {}])
async def test_an_answer_without_a_count_leads_to_the_estimate(content: Any) -> None:
    """D6: such as a page that answers every path, or a count of zero."""
    assert await counts(CountingServer(lambda _path, _document: (200, content)), HELLO) == [ESTIMATE]


async def test_a_chat_that_the_server_rejects_is_estimated_alone() -> None:
    """D6: the next one is counted again."""
    assert await counts(CountingServer(vllm), HELLO, chat(user([*PARTS, IMAGE])), HELLO) == [102, 4 + 4, 102]


async def test_an_unknown_model_does_not_affect_another() -> None:
    """D6: a server also answers 404 for a model that it does not know."""
    assert await counts(CountingServer(vllm), chat(user("Hello there!"), model="unknown"), HELLO) == [ESTIMATE, 102]


@pytest.mark.rule("D6", "A server in trouble is never guessed about.")
@pytest.mark.parametrize("status", [408, 409, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("failing", ["/tokenize", "/apply-template"])
async def test_a_server_in_trouble_is_never_guessed_about(status: int, failing: str) -> None:
    """D6, D3: its answer is returned, so that the line is retried; and the failure is not remembered."""
    server = CountingServer(lambda path, document: (status, {}) if path == failing else llama(path, document))
    async with server.tokens() as tokens:
        reply = await tokens.count(HELLO)
        server.respond = llama
        assert await tokens.count(HELLO) == 12
    assert isinstance(reply, Answer)
    assert reply.status == status
    assert isinstance(classify_reply(reply, endpoint=CHAT), Retryable)


async def test_a_failure_in_the_middle_of_counting_is_returned() -> None:
    """D6: also at the second request of llama.cpp's two, once its routes are known."""
    server = CountingServer(
        lambda path, document: (500, {}) if document.get("content") == "Hello there!" else llama(path, document)
    )
    (reply,) = await counts(server, HELLO)
    assert isinstance(reply, Answer)
    assert reply.status == 500


async def test_an_unavailable_server_is_a_fault() -> None:
    """D6, D3: a refused connection is returned as a fault."""
    async with serving(CountingServer(vllm).behave) as wire:
        port = wire.port
    async with client(port) as upstream:
        fault = await UpstreamTokens(upstream, clock=ManualClock()).count(HELLO)
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
async def test_the_estimate_is_a_token_for_four_bytes_and_four_for_a_message(
    messages: list[dict[str, Any]], tokens: int
) -> None:
    """D6: a token for every four bytes of UTF-8 of all texts, rounded up once, and four for each message."""
    assert await counts(CountingServer(lambda _path, _document: NOT_FOUND), chat(*messages)) == [tokens]


@pytest.mark.parametrize("respond", [vllm, llama])
async def test_an_exact_count_is_that_of_the_tokenizer(respond: Responder) -> None:
    """G5."""
    server = CountingServer(respond)
    async with server.tokens() as tokens:
        assert await tokens.count_exactly(HELLO) == await tokens.count(HELLO)


@pytest.mark.parametrize(
    "respond",
    [lambda *_: NOT_FOUND, old_sglang, lambda *_: (503, {}), lambda *_: (429, {})],
    ids=["no-route", "no-chats", "failing", "busy"],
)
async def test_without_a_tokenizer_there_is_no_exact_count(respond: Responder) -> None:
    """G5: an estimate is never passed off as a count."""
    async with CountingServer(respond).tokens() as tokens:
        assert await tokens.count_exactly(HELLO) is None


async def test_a_chat_that_cannot_be_read_is_not_counted() -> None:
    server = CountingServer(vllm)
    async with server.tokens() as tokens:
        for body in (b"[]", b'{"messages": 7}', chat(user(PARTS))):
            assert await tokens.count_exactly(body) is None


async def test_only_so_many_routes_are_remembered() -> None:
    """Clients choose the names of models."""
    server = CountingServer(lambda *_: NOT_FOUND)
    async with server.tokens() as tokens:
        for number in range(300):
            await tokens.count_exactly(chat(user("a"), model=f"m{number}"))
        assert len(tokens._routes) <= 256
