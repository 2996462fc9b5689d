"""What a classification model answers: D7."""

import json

import pytest

from batchline.domain.models import ModelKind
from batchline.domain.outcomes import Outcome, Retryable, Success, classify_reply
from batchline.domain.replies import Answer

CHAT = "/v1/chat/completions"


def classify(body: bytes, *, kind: ModelKind = ModelKind.CLASSIFICATION, endpoint: str = CHAT) -> Outcome:
    return classify_reply(Answer(status=200, body=body), endpoint=endpoint, kind=kind)


def answer(content: bytes) -> bytes:
    return b'{"n":1.10,"choices":[{"x":1.0,"message":{"role":"assistant","content":%b,"r":null}},{"y":2}]}' % content


@pytest.mark.rule("D7", "A classification is a JSON document as a string.")
@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b'{"a": 1.10}', '{"a": 1.10}'),
        (b'[1,\n"\\u00e9"]', '[1, "\\u00e9"]'),
        (b'"{\\"a\\":1.10}"', '{"a":1.10}'),
        (b'"null"', "null"),
        (b"5", "5"),
    ],
)
def test_the_content_is_a_document_in_a_string(content: bytes, text: str) -> None:
    """D7: and all around it keeps its bytes."""
    outcome = classify(answer(content))
    assert isinstance(outcome, Success)
    before, _, after = answer(b"@").partition(b"@")
    body = before + json.dumps(text).encode() + after.removesuffix(b"}") + b',"system_fingerprint":null}'
    assert outcome.body == body


@pytest.mark.rule("D7", "A text that is no JSON is no classification.")
@pytest.mark.parametrize(
    "body",
    [
        answer(b'"news"'),
        answer(b'""'),
        answer(b'"{"'),
        answer(b"null"),
        answer(b'"' + b"[" * 100_000 + b'"'),
        b'{"choices":[{"message":{}}]}',
        b'{"choices":[{"message":5}]}',
        b'{"choices":[{}]}',
        b'{"choices":[]}',
        b'{"choices":5}',
        b"{}",
        b"[]",
        b'"text"',
    ],
)
def test_an_answer_without_a_document_is_an_upstreams_fault(body: bytes) -> None:
    """D7: worth another attempt, as an answer that is no JSON is."""
    outcome = classify(body)
    assert isinstance(outcome, Retryable)
    assert outcome.kind == "not_json"
    assert isinstance(classify(body, kind=ModelKind.CHAT), Success)
    assert isinstance(classify(body, endpoint="/v1/responses"), Success)


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085"])
def test_a_document_stays_on_one_line(character: str, as_text: bool) -> None:
    """D1, D7: whether it came as an object or as the text of one."""
    document = json.dumps({"a": character}, ensure_ascii=False)
    content = json.dumps(document, ensure_ascii=False) if as_text else document
    outcome = classify(answer(content.encode()))
    assert isinstance(outcome, Success)
    assert len(outcome.body.decode().splitlines()) == 1
    told = json.loads(outcome.body)["choices"][0]["message"]["content"]
    assert json.loads(told) == {"a": character}
