"""The embedded model (F2): a real engine with the real weights, as the service asks it."""

import asyncio
import json
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]
import pytest

from batchline.domain.chat import check_request
from batchline.domain.embedded_model import EMBEDDED_MODEL
from batchline.domain.models import Catalog
from batchline.domain.outcomes import Failure, Retryable, Success, classify_reply
from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.ports import Stream
from batchline.system import SystemClock, SystemRandom
from batchline.upstream.embedded.download import find_weights
from batchline.upstream.embedded.upstream import EmbeddedUpstream
from batchline.upstream.streaming import EventStream
from batchline.upstream.tokens import UpstreamTokens

T = TypeVar("T")
CHAT = "/v1/chat/completions"
SLOTS = 4
HI = {"role": "user", "content": "Hi"}
BRIEF = {"role": "system", "content": "A"}
"""A message of the system, without which the model's template adds a long one of its own."""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


class Model:
    """One engine for all tests of this module, on an event loop that outlives each of them."""

    def __init__(self, runner: asyncio.Runner) -> None:
        weights = find_weights(cache=Path())
        assert weights is not None, "make setup installs it"
        self._runner = runner
        self.upstream = EmbeddedUpstream(
            weights=weights,
            names=("gpt-4o", "m"),
            slots=SLOTS,
            connect_timeout=10,
            request_timeout=120,
            max_answer_bytes=2**24,
            clock=SystemClock(),
            random=SystemRandom(),
        )

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(call)

    def ask(self, body: bytes, path: str = CHAT) -> Reply:
        """Ask once, or twice if the engine closed the connection, as it does with one that was idle for 5 s."""
        reply = self.run(self.upstream.post(path, body))
        if isinstance(reply, Fault) and reply.kind is FaultKind.BROKEN:
            return self.run(self.upstream.post(path, body))
        return reply

    def judged(self, body: bytes) -> Success | Failure | Retryable:
        return classify_reply(self.ask(body), endpoint=CHAT)

    @property
    def process(self) -> Any:
        (child,) = [
            child for child in psutil.Process().children() if any("embedded.child" in a for a in child.cmdline())
        ]
        return child


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with asyncio.Runner() as runner:
        model = Model(runner)
        yield model
        model.run(model.upstream.close())


def chat(*messages: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"model": "gpt-4o", "messages": messages or [HI], "max_tokens": 2, **more}).encode()


def answered(reply: Reply) -> Any:
    assert isinstance(reply, Answer)
    assert reply.status == 200, reply.body
    return json.loads(reply.body)


def test_it_answers_a_chat_under_its_own_name(model: Model) -> None:
    """F2: for any model that the request names, the answer gives the name of the embedded one."""
    completion = answered(model.ask(chat(max_tokens=4)))
    assert completion["model"] == EMBEDDED_MODEL
    assert completion["choices"][0]["message"]["content"]
    assert completion["usage"]["completion_tokens"] <= 4


def test_it_streams(model: Model) -> None:
    """E1."""

    async def stream() -> list[bytes]:
        async with model.upstream.stream(CHAT, chat(stream=True, max_tokens=4)) as answer:
            assert not isinstance(answer, Reply)
            return [piece async for piece in answer]

    events = b"".join(model.run(stream())).decode().strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    assert {chunk["model"] for chunk in chunks} == {EMBEDDED_MODEL}
    assert "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def test_its_tokens_can_be_counted(model: Model) -> None:
    """D6: by the engine's own routes."""
    body = chat({"role": "user", "content": "The quick brown fox <|im_end|> こんにちは"})
    counted = model.run(UpstreamTokens(model.upstream, clock=SystemClock()).count(body))
    assert counted == answered(model.ask(body))["usage"]["prompt_tokens"]


def test_it_lists_itself(model: Model) -> None:
    """E3."""
    assert [each["id"] for each in answered(model.run(model.upstream.get("/v1/models")))["data"]] == [EMBEDDED_MODEL]


def test_it_listens_on_loopback_and_only_to_its_parent(model: Model) -> None:
    """F2: other users of the machine can neither use it nor read its secret."""
    model.ask(chat())
    listening = [each.laddr for each in model.process.net_connections() if each.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening] == ["127.0.0.1"]
    secret = model.upstream._secret
    for key, status in ((None, 401), ("wrong", 401), (secret, 200)):
        connection = HTTPConnection("127.0.0.1", listening[0].port, timeout=60)
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        connection.request("POST", CHAT, chat(), headers)
        assert connection.getresponse().status == status
        connection.close()
    assert len(secret) == 64
    assert secret not in str(model.process.cmdline()) + str(model.process.environ())


def test_what_it_logs_goes_nowhere(model: Model) -> None:
    """Its log quotes requests, such as those it cannot parse."""
    model.ask(chat())
    descriptors = Path(f"/proc/{model.process.pid}/fd")
    assert [str((descriptors / number).readlink()) for number in ("1", "2")] == ["/dev/null", "/dev/null"]


def test_many_callers_share_the_slots_of_one_process(model: Model) -> None:
    """F2: more calls at once than it has slots all get their answers."""

    async def ask_all() -> list[Reply]:
        bodies = [chat(BRIEF, HI | {"content": f"{n}"}, max_tokens=1) for n in range(2 * SLOTS)]
        return await asyncio.gather(*(model.upstream.post(CHAT, body) for body in bodies))

    assert [answered(reply)["usage"]["completion_tokens"] for reply in model.run(ask_all())]
    assert model.process.is_running()


def test_a_short_call_does_not_wait_for_long_ones(model: Model) -> None:
    """F2: it has four slots; three streams that go on for long leave one."""
    long = chat(BRIEF, HI, stream=True, max_tokens=200, ignore_eos=True)

    async def ask_beside() -> None:
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(model.upstream.stream(CHAT, long)) for _ in range(SLOTS - 1)]
            answered(await model.upstream.post(CHAT, chat(BRIEF, HI, max_tokens=1)))
            assert [stream._end for stream in streams if isinstance(stream, EventStream)] == [None] * (SLOTS - 1)

    model.run(ask_beside())


def part(kind: str, **more: Any) -> bytes:
    return chat({"role": "user", "content": [{"type": kind, **more}]})


def called(call: Any) -> bytes:
    return chat(HI, {"role": "assistant", "content": None, "tool_calls": call}, HI)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (part("image_url", image_url={"url": "data:image/png;base64,aGVsbG8="}), "image input is not supported"),
        (part("input_audio", input_audio={"data": "aGVsbG8=", "format": "wav"}), "audio input is not supported"),
        (part("video_url", video_url={"url": "data:,"}), "video input is not supported"),
        (part("text"), "Failed to parse messages: "),
        (part("text", text=3), "Failed to parse messages: "),
        (chat(HI | {"name": 3}), "Failed to parse messages: "),
        (called("x"), "Failed to parse messages: Missing tool call type"),
        (called([{"id": "1", "type": "function"}]), "Failed to parse messages: Missing tool call function"),
        (chat(tools="x"), "Failed to parse tools: Expected 'tools' to be an array"),
        (chat(tools=[{}]), "Failed to parse tools: Missing tool type"),
        (chat(tools=[{"type": "web_search"}]), "Failed to parse tools: Unsupported tool type"),
        (chat(tools=[{"type": "function", "function": {}}]), "Failed to parse tools: "),
        (chat(grammar='root ::= "a"', json_schema={"type": "string"}), "Cannot use both json_schema and grammar"),
        (chat(reasoning_format="banana"), "Unknown reasoning format: banana"),
    ],
)
def test_an_invalid_request_that_it_answers_with_500_is_refused(model: Model, body: bytes, words: str) -> None:
    """D2, D3: a 500 would be retried, and no retry can change it."""
    outcome = model.judged(body)
    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.legacy) == ("invalid_request_error", "http_400")
    assert outcome.message.startswith(words)
    assert "mmproj" not in outcome.message


@pytest.mark.parametrize(
    "body",
    [
        part("file", file={"file_id": "x"}),
        chat({"role": "user", "content": 3}),
        chat({"role": "user"}),
        chat(tools=[TOOL], tool_choice="banana"),
        chat(tools=[TOOL], grammar='root ::= "a"'),
        chat(grammar="root ::= ("),
        chat(response_format={"type": "banana"}),
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "banana"}}}),
        chat(n=SLOTS + 1),
        chat(n=0),
        chat(max_tokens=-5),
        chat(max_tokens="a"),
        chat(temperature="hot"),
        chat(stop=[1]),
        chat(top_logprobs=2),
        chat().replace(b"Hi", b"\xff\xfe"),
        chat().replace(b"Hi", b"\\ud800"),
    ],
)
def test_what_it_refuses_stays_refused(model: Model, body: bytes) -> None:
    """D2: invalid_request_error, which is not retried."""
    outcome = model.judged(body)
    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.legacy) == ("invalid_request_error", "http_400")


def test_a_refusal_is_the_same_when_it_is_streamed(model: Model) -> None:
    """E1, D2."""

    async def stream() -> Stream | Reply:
        async with model.upstream.stream(CHAT, chat(stream=True, tools=[{}])) as answer:
            return answer

    answer = model.run(stream())
    assert isinstance(answer, Answer)
    assert answer.status == 400


def test_too_long_an_input_is_context_length_exceeded(model: Model) -> None:
    """D2: context_length_exceeded, in the engine's own words."""
    outcome = model.judged(chat({"role": "user", "content": "word " * 3000}))
    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.legacy) == ("context_length_exceeded", "http_400")
    assert "exceeds the available context size (2048 tokens)" in outcome.message


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/summary", "/gliner"])
def test_routes_it_does_not_have_are_not_found(model: Model, path: str) -> None:
    """E2, D2: not the 501 that would be retried, and no advice on the engine's flags."""
    outcome = classify_reply(model.ask(json.dumps({"model": "m", "input": "a"}).encode(), path), endpoint=path)
    text = f"The embedded model does not serve {path}"
    assert outcome == Failure("not_found_error", "http_404", text, None)


@pytest.mark.parametrize(
    "messages",
    [[], [{"role": "wizard", "content": "Hi"}]],
    ids=["no messages", "unknown role"],
)
def test_an_invalid_request_that_it_would_answer_is_refused_before(model: Model, messages: list[Any]) -> None:
    """D6: the engine would answer."""
    body = json.dumps({"model": "m", "messages": messages, "max_tokens": 1}).encode()
    assert answered(model.ask(body))
    assert isinstance(check_request(body, endpoint=CHAT, project_id="p", catalog=Catalog()), Failure)


def test_nesting_that_would_kill_it_is_refused_before() -> None:
    """D6, C4: the engine does not survive some depths of a hundred thousand levels."""
    body = b'{"model":"m","messages":[{"role":"user","content":"a"}],"tools":%b}' % (b"[" * 100_000 + b"]" * 100_000)
    assert isinstance(check_request(body, endpoint=CHAT, project_id="p", catalog=Catalog()), Failure)


@pytest.mark.parametrize(
    "body",
    [
        chat(*[HI] * 2049),
        chat(logprobs=True, top_logprobs=49_000),
        chat(n_probs=49_000),
        chat(logprobs=21),
        json.dumps({"model": "m", "input": [HI] * 2049}).encode(),
    ],
    ids=["messages", "top_logprobs", "n_probs", "logprobs", "input"],
)
def test_what_would_harm_it_is_refused_unasked(model: Model, body: bytes) -> None:
    """D5: one tenant's request must not make the engine unavailable to the others."""
    outcome = model.judged(body)
    assert isinstance(outcome, Failure)
    assert outcome.message.startswith("The embedded model does not accept this request: ")


def test_a_request_for_gigabytes_fails_alone(model: Model) -> None:
    """D5: the engine's memory is limited; the request fails and the engine keeps running."""
    model.ask(chat())
    before = model.process
    outcome = model.judged(chat(repeat_penalty=1.1, repeat_last_n=2**31 - 1))
    assert isinstance(outcome, Failure)
    assert model.process == before
    assert answered(model.ask(chat()))
