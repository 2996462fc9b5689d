"""An error that an upstream sends with a 2xx: D1."""

import json
from typing import Any

import pytest

from batchline.domain.outcomes import Failure, Outcome, Retryable, Success, classify_reply
from batchline.domain.replies import Answer

CHAT, EMBED, RESPONSES = "/v1/chat/completions", "/v1/embeddings", "/v1/responses"


def classify(body: Any, *, endpoint: str = CHAT, status: int = 200, **fields: Any) -> Outcome:
    return classify_reply(Answer(status=status, body=json.dumps(body).encode(), **fields), endpoint=endpoint)


@pytest.mark.rule("D1", "A 2xx with an error and no result is a fault.")
@pytest.mark.parametrize("endpoint", [CHAT, EMBED, RESPONSES, "/gliner", "/v1/rerank"])
@pytest.mark.parametrize(
    ("body", "text"),
    [
        pytest.param({"error": {"message": "Provider returned error"}}, "Provider returned error", id="openrouter"),
        pytest.param({"error": "model is loading"}, "model is loading", id="text"),
        pytest.param(
            {"error": {"message": "upstream error", "type": "upstream_error", "param": "", "code": "bad_response"}},
            "upstream error",
            id="one-api",
        ),
        pytest.param(
            {"error": {"message": "busy", "code": 1302}, "id": "2024", "request_id": "7"}, "busy", id="own numbers"
        ),
        pytest.param({"error": {"message": "odd", "code": 200}}, "odd", id="a code that is no failure"),
        pytest.param({"error": {"message": "odd", "code": True, "status": [500]}}, "odd", id="a code of another type"),
        pytest.param({"error": {"message": "odd"}, "object": "error", "model": "m"}, "odd", id="with other fields"),
    ],
)
def test_an_error_in_place_of_a_result_is_a_fault(endpoint: str, body: Any, text: str) -> None:
    """D1: the line is tried again, and the upstream does not count as unavailable."""
    assert classify(body, endpoint=endpoint, retry_after=2.0) == Retryable(
        "error_in_200", f"upstream returned 200 with an error: {text}", retry_after=2.0
    )


@pytest.mark.parametrize("nothing", [None, []])
@pytest.mark.parametrize(("endpoint", "field"), [(CHAT, "choices"), ("/v1/completions", "choices"), (EMBED, "data")])
def test_an_empty_result_beside_an_error_is_no_result(endpoint: str, field: str, nothing: object) -> None:
    """D1: some gateways fill in the other fields of an answer."""
    body = {"id": "", "object": "", "created": 0, "model": "", field: nothing, "usage": {}, "error": {"message": "no"}}
    assert isinstance(classify(body, endpoint=endpoint), Retryable)


@pytest.mark.rule("D1", "A 2xx whose error names an HTTP status counts as that status.")
@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"message": "Provider returned error", "code": 429, "metadata": {"raw": "is rate-limited upstream"}}, 429),
        ({"code": 503, "message": "The model is overloaded.", "status": "UNAVAILABLE"}, 503),
        ({"message": "litellm.InternalServerError", "type": None, "param": None, "code": "500"}, 500),
        ({"message": "Insufficient credits. Add more", "code": 402}, 402),
        ({"message": "maximum context length is 8192", "code": 400, "param": "messages"}, 400),
        ({"message": "wrong key", "code": "invalid_api_key", "status": 401}, 401),
        ({"message": "gone", "status_code": 404}, 404),
        ({"message": "timeout", "code": None, "status": "599"}, 599),
        ({"message": "conflict", "code": "409"}, 409),
    ],
)
def test_an_error_that_names_a_status_counts_as_that_status(error: dict[str, Any], status: int) -> None:
    """D1."""
    outcome = classify({"error": error, "user_id": "u"}, retry_after=4.0)
    assert outcome == classify({"error": error, "user_id": "u"}, status=status, retry_after=4.0)
    assert isinstance(outcome, Failure | Retryable)


@pytest.mark.rule("D1", "A result beside an error is a result.")
@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {"choices": [{"message": {"content": "hi"}}], "error": {"message": "cut off", "code": 502}}),
        (CHAT, {"choices": [{"message": {"content": "hi"}, "error": {"code": 502}}]}),
        (CHAT, {"choices": [], "prompt_filter_results": []}),
        (CHAT, {"choices": [{}], "error": None}),
        (EMBED, {"data": [{"embedding": [0.5]}], "error": {"message": "one failed"}}),
        (RESPONSES, {"id": "resp_1", "status": "completed", "output": [{}], "error": None}),
        (RESPONSES, {"id": "resp_1", "status": "failed", "output": [], "error": {"code": "server_error"}}),
        ("/gliner", {"entities": [], "error": {"message": "partly"}}),
        ("/v1/moderations", {"results": [{}], "error": {"message": "partly"}}),
    ],
)
def test_a_result_beside_an_error_is_a_result(endpoint: str, body: Any) -> None:
    """D1: what the model answered is not thrown away."""
    assert isinstance(classify(body, endpoint=endpoint), Success)


@pytest.mark.parametrize("endpoint", [CHAT, EMBED, "/gliner"])
@pytest.mark.parametrize("nothing", [None, False, 0, "", [], {}])
def test_an_empty_error_is_no_error(endpoint: str, nothing: object) -> None:
    """D1: many servers send the field with every answer."""
    assert isinstance(classify({"error": nothing}, endpoint=endpoint), Success)
