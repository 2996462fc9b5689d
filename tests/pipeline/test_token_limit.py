"""Inputs within a model's limit of tokens (D6): what is sent as it is, what is cut and where, what is refused."""

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchline.domain.models import Model
from batchline.domain.outcomes import Failure
from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.pipeline.token_limit import TokenLimit
from batchline.system import SystemClock
from batchline.upstream.http import HttpUpstream
from batchline.upstream.tokens import UpstreamTokens

CHAT = "/v1/chat/completions"
OUTAGE = Fault(kind=FaultKind.TIMEOUT, detail="no answer")
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


class Characters:
    """A token for each character of each text. It fails at the counts it is told to."""

    def __init__(self, *, faults: Sequence[int] = ()) -> None:
        self.asked: list[bytes] = []
        self._faults = faults

    async def count(self, body: bytes) -> int | Reply:
        self.asked.append(body)
        return OUTAGE if len(self.asked) in self._faults else self.measure(body)

    async def count_exactly(self, body: bytes) -> int:
        return self.measure(body)

    def measure(self, body: bytes) -> int:
        return sum(len(text) for message in json.loads(body)["messages"] for text in texts_of(message["content"]))


class Bumpy(Characters):
    """As tokenizers are: one more character can make fewer tokens."""

    def measure(self, body: bytes) -> int:
        count = super().measure(body)
        return count + count % 3


def texts_of(content: Any) -> list[str]:
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content or [] if "text" in part]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def request(*messages: dict[str, Any]) -> bytes:
    return json.dumps({"model": "m", "messages": messages, "max_tokens": 1}).encode()


def limited(max_tokens: int | None, *, refuse: bool = False) -> Model:
    return Model(id="m", name="m", max_tokens=max_tokens, error_on_max_token=refuse)


def fit(body: bytes, model: Model, tokens: Characters) -> bytes | Failure | Reply:
    return asyncio.run(TokenLimit(tokens={"one": tokens}).apply(body, model, upstream="one"))


def sent(body: bytes, model: Model, tokens: Characters | None = None) -> Any:
    """The messages of a chat that was found to fit, or made to."""
    fitted = fit(body, model, tokens or Characters())
    assert isinstance(fitted, bytes)
    return json.loads(fitted)["messages"]


def test_without_a_limit_nobody_is_asked() -> None:
    """D6: limits cost those nothing who set none."""
    tokens, body = Characters(), request(user("x" * 5000))
    assert fit(body, limited(None), tokens) is body
    assert not tokens.asked


@pytest.mark.parametrize(("spare", "asked"), [(1024, 0), (1023, 1)])
def test_a_body_that_fits_for_sure_is_not_counted(spare: int, asked: int) -> None:
    """D6: a token is at least a byte, and a template adds less than 1,024 of them."""
    tokens, body = Characters(), request(user("x" * 100))
    assert fit(body, limited(len(body) + spare), tokens) is body
    assert len(tokens.asked) == asked


@pytest.mark.rule("D6", "An input of exactly the limit is sent as it is.")
@pytest.mark.parametrize("refuse", [True, False])
def test_an_input_of_the_limit_is_sent_as_it_is(refuse: bool) -> None:
    """D6: the limit itself is allowed, and the bytes stay the same."""
    tokens, body = Characters(), b'{ "messages" : [{"role":"user","content":"12345"}],"model":"m"}'
    assert fit(body, limited(5, refuse=refuse), tokens) is body
    assert tokens.asked == [body]


@pytest.mark.rule("D6", "With error_on_max_token a longer input is refused.")
@pytest.mark.rule("D6", "It is context_length_exceeded, HTTP 400.")
def test_a_longer_input_is_refused() -> None:
    """D6: with error_on_max_token one token too many is context_length_exceeded, HTTP 400, with both numbers."""
    tokens = Characters()
    failure = fit(request(user("123456")), limited(5, refuse=True), tokens)
    assert isinstance(failure, Failure)
    assert (failure.code, failure.legacy, failure.param) == ("context_length_exceeded", "http_400", "messages")
    assert "6 tokens" in failure.message
    assert "at most 5" in failure.message
    assert len(tokens.asked) == 1


@pytest.mark.rule("D6", "The end of the text is cut.")
@settings(deadline=None)
@given(text=texts, limit=st.integers(1, 200))
def test_as_little_as_possible_is_cut(text: str, limit: int) -> None:
    """D6: the longest beginning of the text that fits is kept, whatever the script."""
    assert sent(request(user(text)), limited(limit)) == [user(text[:limit])]


@pytest.mark.rule("D6", "Until the input fits.")
@settings(deadline=None)
@given(text=texts.filter(bool), limit=st.integers(1, 200))
def test_what_is_sent_was_counted_and_fits(text: str, limit: int) -> None:
    """D6: tokens do not grow evenly with the text, so only a counted body is known to fit; counts stay few."""
    tokens = Bumpy()
    fitted = fit(request(user(text)), limited(limit), tokens)
    assert isinstance(fitted, bytes)
    assert fitted in tokens.asked
    assert tokens.measure(fitted) <= limit
    assert text.startswith(json.loads(fitted)["messages"][0]["content"])
    assert len(tokens.asked) <= math.log2(len(text)) + 2


def test_every_other_value_keeps_its_bytes() -> None:
    """D6, C5: big integers, number formats, the order of keys and escapes survive a cut beside them."""
    before = (
        b'{"seed":123456789012345678901234567890,"temperature":1.10,"messages":[{"role":"system","content":"\\u00e9"},'
    )
    message = b'{"name":"x","content":"%b","role":"user","n":1e2}'
    after = b',{"role":"assistant","content":null,"k":[1.0, 2]}],"model":"m","top_p":1E-1}'
    whole, cut = (before + message % text + after for text in (b"abc \\ud83d\\ude00def", "abc 😀".encode()))
    assert fit(whole, limited(6), Characters()) == cut


@pytest.mark.rule("D6", "Of the last user text.")
def test_the_last_user_message_is_cut() -> None:
    """D6: not the system's, not an answer's, not an earlier question, even where those are longer."""
    messages = [user("a" * 50), {"role": "assistant", "content": "b" * 9}, user("c" * 20)]
    last = {"role": "assistant", "content": "d"}
    assert sent(request(*messages, last), limited(70)) == [*messages[:2], user("c" * 10), last]


def test_the_last_text_among_parts_is_cut() -> None:
    """D6: what is no text stays, as do the texts before."""
    first, second = {"type": "text", "text": "first"}, {"type": "text", "text": "second", "cache": True}
    parts = sent(request(user([first, IMAGE, second, IMAGE])), limited(8))[0]["content"]
    assert parts == [first, IMAGE, second | {"text": "sec"}, IMAGE]


@pytest.mark.rule("D6", "Where it cannot fit it is refused.")
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "x" * 11}, user("short")],
        [{"role": "system", "content": "x" * 11}, user("")],
        [{"role": "system", "content": "x" * 11}],
        [user("x" * 11), user([IMAGE])],
        [user("x" * 11), user(None)],
    ],
)
def test_what_cannot_fit_is_refused(messages: list[dict[str, Any]]) -> None:
    """D6: where the rest alone is too long, or there is no last user text to cut."""
    failure = fit(request(*messages), limited(10), Characters())
    assert isinstance(failure, Failure)
    assert failure.code == "context_length_exceeded"


def test_a_text_may_be_cut_to_nothing() -> None:
    """D6: the last that fits is the empty text."""
    system = {"role": "system", "content": "x" * 10}
    assert sent(request(system, user("ab")), limited(10)) == [system, user("")]


@pytest.mark.parametrize("nth", [1, 2, 4])
def test_a_fault_of_the_counter_is_handed_back(nth: int) -> None:
    """D6, D3: at the first count or in the middle of a search, the line is tried again and not guessed about."""
    assert fit(request(user("x" * 100)), limited(50), Characters(faults=[nth])) is OUTAGE


def test_each_upstream_counts_for_its_own_models() -> None:
    """D6: tokens are those of the server that will read them."""
    near, far = Characters(), Characters()
    model = Model(id="m", name="m", max_tokens=1, error_on_max_token=True)
    asyncio.run(TokenLimit(tokens={"near": near, "far": far}).apply(request(user("xyz")), model, upstream="far"))
    assert (len(near.asked), len(far.asked)) == (0, 1)


async def fit_and_ask(url: str, body: bytes, model: Model) -> tuple[Any, int]:
    """What was fitted by a real server's tokens, and how many it then says that it read."""
    upstream = HttpUpstream(
        url, api_key=None, connect_timeout=10, request_timeout=120, max_answer_bytes=2**24, clock=SystemClock()
    )
    try:
        token_limit = TokenLimit(tokens={"one": UpstreamTokens(upstream, clock=SystemClock())})
        fitted = await token_limit.apply(body, model, upstream="one")
        if not isinstance(fitted, bytes):
            return fitted, 0
        answer = await upstream.post(CHAT, fitted)
        assert isinstance(answer, Answer)
        return json.loads(fitted)["messages"], json.loads(answer.body)["usage"]["prompt_tokens"]
    finally:
        await upstream.close()


@pytest.mark.parametrize(
    "text",
    [
        "The quick brown fox jumps over the lazy dog. " * 200,
        "Γειά σου, κόσμε! こんにちは世界 👩‍👩‍👧‍👦 " * 60,
        "<|im_end|>\n<|im_start|>user\n" * 100,
        "0123456789" * 500 + "\n \t" * 400,
    ],
    ids=["english", "scripts", "special", "digits"],
)
def test_a_real_server_reads_what_was_left(llama_url: str, text: str) -> None:
    """D6: a text cut to 100 real tokens is a beginning of it, within the limit, and close to it."""
    (message,), read = asyncio.run(fit_and_ask(llama_url, request(user(text)), limited(100)))
    assert text.startswith(message["content"])
    assert 94 <= read <= 100


def test_a_real_server_decides_what_is_too_long(llama_url: str) -> None:
    """D6: at exactly the tokens that the server reads a chat is sent; with one less it is refused."""
    body = request(user("The quick brown fox jumps over the lazy dog. " * 8))
    _, read = asyncio.run(fit_and_ask(llama_url, body, limited(None)))
    assert asyncio.run(fit_and_ask(llama_url, body, limited(read, refuse=True)))[1] == read
    failure, _ = asyncio.run(fit_and_ask(llama_url, body, limited(read - 1, refuse=True)))
    assert isinstance(failure, Failure)
    assert f"{read} tokens" in failure.message


def test_what_cannot_fit_a_real_template_is_refused(llama_url: str) -> None:
    """D6: this model's template alone, with no text in it, is over twenty tokens."""
    failure, _ = asyncio.run(fit_and_ask(llama_url, request(user("Hello")), limited(20)))
    assert isinstance(failure, Failure)
    assert failure.code == "context_length_exceeded"
