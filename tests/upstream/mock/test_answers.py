"""The mock upstream's answers: OpenAI's shapes, streamed and not, and text that says that it is scripted."""

import json
from typing import Any

import pytest
from openai.types.responses import Response

from batchline.domain.usage import Usage, reported_usage
from batchline.upstream.mock.script import Plan, Script, ScriptedOutcome

CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
RESPONSES = "/v1/responses"
STREAMED = [CHAT, RESPONSES]
TEXT_ROUTES = ["/summary", "/usecase/classify/iab", "/gliner"]


def chat(*prompts: str, model: str = "m", **fields: Any) -> bytes:
    messages = [{"role": "user", "content": prompt} for prompt in prompts]
    return json.dumps({"model": model, "messages": messages, **fields}).encode()


def asking(path: str, prompt: str) -> bytes:
    if path == CHAT:
        return chat(prompt, stream=True)
    return json.dumps({"model": "m", "input": prompt, "stream": True}).encode()


def decide(path: str, body: bytes, *, plan: Plan | None = None) -> ScriptedOutcome:
    return Script(plan).decide(path, body)


def documents(events: bytes) -> list[Any]:
    """Return the JSON of every event except the final [DONE] of a chat."""
    lines = (line.removeprefix(b"data: ") for line in events.split(b"\n") if line.startswith(b"data: "))
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def test_a_chat_has_openais_shape_and_says_that_it_is_scripted() -> None:
    """The text repeats no more than 200 characters of the prompt."""
    body = chat("first words", "x" * 300, model="some-model")
    document = json.loads(decide(CHAT, body).body)
    assert document == {
        "id": document["id"],
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "some-model",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "scripted answer to: " + "x" * 200, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
        "system_fingerprint": "fp_scripted",
    }


@pytest.mark.parametrize(
    ("prompt", "status", "type_and_code"),
    [
        ("[[error=context_length_exceeded]]", 400, ("invalid_request_error", "context_length_exceeded")),
        ("[[status=429]]", 429, ("rate_limit_exceeded", "rate_limit_exceeded")),
        ("[[status=429 error=insufficient_quota]]", 429, ("insufficient_quota", "insufficient_quota")),
        ("[[status=401]]", 401, ("authentication_error", None)),
        ("[[status=500]]", 500, ("server_error", None)),
    ],
)
def test_errors_have_the_usual_shape(prompt: str, status: int, type_and_code: tuple[str, str | None]) -> None:
    """D2: the error's code distinguishes one 400 or 429 from another."""
    outcome = decide(CHAT, chat(prompt))
    error = json.loads(outcome.body)["error"]
    assert (outcome.status, (error["type"], error["code"])) == (status, type_and_code)


@pytest.mark.parametrize("size", [1_000, 16 * 1024 * 1024])
@pytest.mark.parametrize("prompt", ["", "words", "makes the usage one digit longer "])
def test_huge_answers_have_exactly_the_size_asked_for(size: int, prompt: str) -> None:
    """D1: the limit on answers can be tested with one byte more and one less."""
    body = decide(CHAT, chat(f"[[huge={size}]]{prompt}")).body
    assert len(body) == size
    assert json.loads(body)["object"] == "chat.completion"


def test_pretty_answers_say_the_same_over_many_lines() -> None:
    """D1: an answer with line breaks between its tokens."""
    body = decide(CHAT, chat("[[pretty]]")).body
    assert body.count(b"\n") > 10
    assert json.loads(body)["choices"][0]["message"]["content"] == "scripted answer to: [[pretty]]"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"model":"m"}',
        b'{"model":"m","messages":[],"input":[]}',
        b'{"model":"m","x":' + b"[" * 5000,
        b'{"model":"\xff"}',
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}],"input":"\\ud800"}',
    ],
)
@pytest.mark.parametrize("path", [CHAT, EMBEDDINGS])
def test_an_invalid_body_is_answered_with_400(path: str, body: bytes) -> None:
    assert decide(path, body).status == 400


@pytest.mark.parametrize(("given_input", "count"), [("a", 1), (["a", "b"], 2), ([1, 2], 1), ([[1, 2], [3]], 2)])
def test_embeddings_are_answered_for_every_kind_of_input(given_input: object, count: int) -> None:
    """C14: every kind of input that OpenAI accepts."""
    body = json.dumps({"model": "e", "input": given_input}).encode()
    document = json.loads(decide(EMBEDDINGS, body).body)
    assert [len(item["embedding"]) for item in document["data"]] == [8] * count


@pytest.mark.parametrize("fields", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
def test_a_chat_is_streamed_in_openais_chunks(fields: dict[str, Any]) -> None:
    """E1: first the role, then one chunk per word, then the finish reason, then [DONE]; no usage."""
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


def test_usage_comes_in_its_own_chunk_if_asked_for() -> None:
    """E2: a stream is charged by its usage."""
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
def test_an_answer_is_not_streamed_unless_asked_for(fields: dict[str, Any]) -> None:
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
def test_errors_are_not_streamed(path: str, directive: str, status: int, kind: str) -> None:
    """E2: an error is a plain answer, also to a request for a stream."""
    outcome = decide(path, asking(path, f"[[{directive}]]"))
    assert (outcome.status, outcome.content_type, outcome.events) == (status, kind, ())


def test_a_response_has_openais_shape() -> None:
    """E2: the message, and usage with the field names of the Responses API."""
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
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 9,
    }
    assert reported_usage(outcome.body) == Usage(input_tokens=4, cached_tokens=3, output_tokens=5)


def test_a_response_is_streamed_as_named_events() -> None:
    events = decide(RESPONSES, asking(RESPONSES, "hello")).events
    names = [event.partition(b"\n")[0].decode() for event in events]
    assert list(dict.fromkeys(name.removeprefix("event: response.") for name in names)) == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    events_of_stream = documents(b"".join(events))
    assert [f"event: {document['type']}" for document in events_of_stream] == names
    assert events_of_stream[0]["response"]["usage"] is None
    last = events_of_stream[-1]["response"]
    deltas = [document["delta"] for document in events_of_stream if "delta" in document]
    assert len(deltas) == 4
    text = "".join(deltas)
    assert text == last["output"][0]["content"][0]["text"] == "scripted answer to: hello"
    assert (last["status"], last["usage"]["total_tokens"]) == ("completed", 5)


@pytest.mark.parametrize("path", TEXT_ROUTES)
def test_the_other_routes_take_a_text(path: str) -> None:
    """E2: their own shape that says that it is scripted, the usage of chats, and directives in the text."""
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


def test_cached_tokens_are_reported_if_the_prompt_asks_for_them() -> None:
    """D4: prices of cached input can be tested, also together with the faults of a plan."""
    assert reported_usage(decide(CHAT, chat("a [[cached=2]]")).body).cached_tokens == 2
    assert reported_usage(decide(CHAT, chat("a [[cached=2]]"), plan=Plan(cut=100)).body).cached_tokens == 2
    assert reported_usage(decide(CHAT, chat("a")).body).cached_tokens == 0
    assert len(decide(CHAT, chat("a [[cached=2 huge=5000]]")).body) == 5000


def test_a_response_has_the_fields_that_clients_read_though_nothing_requires_them() -> None:
    """inspect-ai reads `reasoning`, for example, and others read `text`."""
    body = json.dumps({"model": "m", "input": "hello"}).encode()
    answer = json.loads(decide(RESPONSES, body).body)
    always_sent = {
        *("background", "completed_at", "max_output_tokens", "max_tool_calls", "previous_response_id", "reasoning"),
        *("safety_identifier", "service_tier", "text", "top_logprobs", "truncation", "user"),
    }
    assert always_sent <= answer.keys() & Response.model_fields.keys()
    assert Response.model_validate(answer).output_text == "scripted answer to: hello"
