"""Which answers of the embedded model's engine become errors that are not retried; test_upstream asks the engine."""

import json

import pytest

from batchline.domain.replies import Answer
from batchline.upstream.embedded.errors import correct_status, reject

CHAT = "/v1/chat/completions"


def engine_error(status: int, message: str) -> Answer:
    return Answer(status=status, body=json.dumps({"error": {"code": status, "message": message}}).encode())


def message_of(answer: Answer) -> str:
    message = json.loads(answer.body)["error"]["message"]
    assert isinstance(message, str)
    return message


@pytest.mark.parametrize(
    "message",
    ["Compute error.", "failed to find free space", "about tools: Failed to parse tools: ", ""],
)
def test_a_failure_of_the_engine_stays_a_500(message: str) -> None:
    """D3: it is retried, also if it quotes words that mean an invalid request."""
    answer = engine_error(500, message)
    assert correct_status(CHAT, answer) is answer


def test_an_error_that_is_not_json_stays_as_it_is() -> None:
    """D3: such as the page of a proxy."""
    answer = Answer(status=503, body=b"<html>")
    assert correct_status(CHAT, answer) is answer


def test_an_invalid_request_becomes_a_400_without_advice_for_the_operator() -> None:
    """D2: the engine's hint names its own flags, which the client cannot set."""
    answer = correct_status(CHAT, engine_error(500, "image input is not supported - hint: use --mmproj"))
    assert (answer.status, message_of(answer)) == (400, "image input is not supported")


@pytest.mark.parametrize("status", [404, 501])
def test_a_route_that_the_engine_lacks_becomes_a_404(status: int) -> None:
    """E2: a 501 would be retried."""
    answer = correct_status("/v1/rerank", engine_error(status, "This server does not support reranking"))
    assert (answer.status, message_of(answer)) == (404, "The embedded model does not serve /v1/rerank")


def test_the_limit_on_logprobs_is_exact() -> None:
    """D5: 20 alternatives are allowed, as in OpenAI's API."""
    assert reject(b'{"top_logprobs":20}', names=()) is None
    rejected = reject(b'{"top_logprobs":21}', names=())
    assert rejected is not None
    assert rejected.status == 400


def test_a_request_for_another_model_is_not_answered_by_the_embedded_one() -> None:
    """D6: a script that asks for gpt-4o must not get the words of a toy in silence."""
    names = ("smollm2-135m-instruct", "any", "mine")
    for name in names:
        assert reject(json.dumps({"model": name}).encode(), names=names) is None
    rejected = reject(b'{"model":"gpt-4o"}', names=names)
    assert rejected is not None
    assert rejected.status == 404
    error = json.loads(rejected.body)["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "'gpt-4o'" in error["message"]
    assert "'smollm2-135m-instruct' and 'any' and 'mine'" in error["message"]
    assert "BATCHLINE_UPSTREAM_URL" in error["message"]
