"""What an attempt means for its line: D1 to D3."""

import json
from typing import Any

import pytest

from batchline.domain.models import ModelKind
from batchline.domain.outcomes import (
    BATCH_CANCELLED,
    BATCH_EXPIRED,
    DELIVERED_TOO_OFTEN,
    KEY_UNAVAILABLE,
    Failure,
    Outcome,
    Retryable,
    Success,
    classify_reply,
    error_line,
    output_line,
)
from batchline.domain.rate_limits import Quota, RateLimits
from batchline.domain.replies import Answer, Fault, FaultKind

CHAT = "/v1/chat/completions"


def judged(status: int, body: object = b"", **fields: Any) -> Outcome:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return classify_reply(Answer(status=status, body=data, **fields), endpoint=CHAT)


def refused(status: int, body: object = b"") -> Failure:
    outcome = judged(status, body)
    assert isinstance(outcome, Failure)
    return outcome


def set_back(status: int, body: object = b"", **fields: Any) -> Retryable:
    outcome = judged(status, body, **fields)
    assert isinstance(outcome, Retryable)
    return outcome


@pytest.mark.rule("D2", "401 and 403 are authentication_error.")
@pytest.mark.rule("D2", "404 is not_found_error.")
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, "invalid_request_error"),
        (405, "invalid_request_error"),
        (418, "invalid_request_error"),
        (422, "invalid_request_error"),
        (431, "invalid_request_error"),
        (499, "invalid_request_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (420, "insufficient_quota"),
    ],
)
def test_a_refusal_is_final(status: int, code: str) -> None:
    """D2: no further attempt, the table's code, and the status as the legacy word."""
    assert refused(status, {"error": {"message": "No."}}) == Failure(code, f"http_{status}", "No.")


@pytest.mark.rule("D2", "402 is insufficient_quota, http_420.")
def test_a_402_is_about_quota() -> None:
    """D2: whatever it says."""
    outcome = refused(402, {"error": {"message": "Insufficient Balance", "type": "unknown_error", "param": None}})
    assert outcome == Failure("insufficient_quota", "http_420", "Insufficient Balance")
    assert refused(402).message == "upstream returned 402"


@pytest.mark.rule("D2", "The upstream's param is kept, also after the last attempt.")
@pytest.mark.parametrize("status", [400, 404, 408, 409, 413, 422, 429])
def test_the_parameter_that_the_upstream_names_is_kept(status: int) -> None:
    outcome = judged(status, {"error": {"message": "No.", "param": "temperature"}})
    assert isinstance(outcome, Failure | Retryable)
    failure = outcome.as_failure(4) if isinstance(outcome, Retryable) else outcome
    assert failure.param == "temperature"


@pytest.mark.rule("D3", "A 401 or 403 says that the upstream is unavailable; other refusals are real answers.")
@pytest.mark.parametrize("status", range(400, 500))
def test_a_refusal_of_the_services_credentials_says_unavailable(status: int) -> None:
    """D3: the line fails all the same, unless its caller holds it because every line is refused."""
    outcome = judged(status, {"error": {"message": "No.", "code": "insufficient_quota"}})
    if isinstance(outcome, Failure):
        assert outcome.unavailable is (status in {401, 403})


@pytest.mark.parametrize("status", [401, 403])
def test_what_an_upstream_says_of_the_services_credentials_is_not_repeated(status: int) -> None:
    """D2: it may quote the operator's key, which is nothing for a tenant to read."""
    outcome = refused(status, {"error": {"message": "Incorrect API key provided: sk-operator", "param": "sk-operator"}})
    assert (outcome.code, outcome.legacy) == ("authentication_error", f"http_{status}")
    assert "sk-operator" not in str(outcome)


@pytest.mark.rule("D2", "A 429 that says quota is insufficient_quota.")
@pytest.mark.parametrize(
    "error",
    [
        {"code": "insufficient_quota", "message": "No money."},
        {"type": "insufficient_quota", "code": None, "message": "No money."},
    ],
)
def test_a_429_that_says_quota_is_final(error: dict[str, str | None]) -> None:
    """D2."""
    assert refused(429, {"error": error}) == Failure("insufficient_quota", "http_429", "No money.")


@pytest.mark.parametrize(
    "body",
    [b"", b"slow down", {"error": {"code": "rate_limit_exceeded", "message": "slow down"}}, {"error": "slow down"}],
)
def test_any_other_429_is_throttling(body: object) -> None:
    """D2, D3: the line waits for Retry-After, and fails as rate_limit_exceeded if throttling never ends."""
    retryable = set_back(429, body, retry_after=7.0)
    assert (retryable.throttled, retryable.unavailable, retryable.retry_after) == (True, True, 7.0)
    assert retryable.kind == "http_429"
    assert retryable.reason == ("slow down" if body else "upstream returned 429")
    assert retryable.as_failure(4) == Failure("rate_limit_exceeded", "http_429", retryable.reason)


@pytest.mark.rule("D2", "408, 409, 3xx and 5xx are tried again.")
@pytest.mark.rule("D2", "After the last attempt: how many there were.")
@pytest.mark.rule("D2", "The text of an upstream's 5xx is not shown.")
@pytest.mark.rule("D3", "500 to 504 and 529 say that the upstream is unavailable.")
@pytest.mark.parametrize("status", [301, 304, 307, 408, 409, 500, 501, 502, 503, 504, 529, 599])
def test_trouble_is_worth_another_attempt(status: int) -> None:
    """D2, D3: after the last attempt it is an internal_error with the number of attempts."""
    retryable = set_back(status, {"error": {"message": "later"}}, retry_after=3.0)
    assert (retryable.throttled, retryable.retry_after, retryable.kind) == (False, 3.0, f"http_{status}")
    assert retryable.unavailable is (status in {500, 501, 502, 503, 504, 529})
    shown = "" if status >= 500 else ": later"
    failure = Failure(
        "internal_error", "retries_exhausted", f"Line failed after 4 attempts: upstream returned {status}{shown}"
    )
    assert retryable.as_failure(4) == failure
    assert set_back(status).reason == f"upstream returned {status}"


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind is not FaultKind.UNREADABLE])
def test_a_fault_is_worth_another_attempt(kind: FaultKind) -> None:
    """D2, D3: what is no HTTP answer, or too large a one, still comes from an upstream that is there."""
    retryable = classify_reply(Fault(kind=kind, detail="what happened"), endpoint=CHAT)
    assert retryable == Retryable(kind=kind, reason="what happened", unavailable=kind is not FaultKind.GARBLED)
    assert isinstance(retryable, Retryable)
    assert retryable.as_failure(2) == Failure(
        "internal_error", "retries_exhausted", "Line failed after 2 attempts: what happened"
    )


@pytest.mark.rule("D2", "A line that workers died on is dlq_exhausted.")
@pytest.mark.parametrize(
    ("failure", "code", "legacy"),
    [
        (KEY_UNAVAILABLE, "authentication_error", "api_key_unavailable"),
        (DELIVERED_TOO_OFTEN, "internal_error", "dlq_exhausted"),
        (BATCH_CANCELLED, "batch_cancelled", "batch_cancelled"),
        (BATCH_EXPIRED, "batch_expired", "batch_expired"),
    ],
)
def test_what_fails_without_an_upstream(failure: Failure, code: str, legacy: str) -> None:
    """D2: the rows that no answer stands behind."""
    record = json.loads(error_line("id", b'"c"', failure))
    assert record["error"]["code"] == code
    assert record["error"]["message"].startswith(f"[legacy:{legacy}] ")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "nested"}}, "nested"),
        ({"error": "plain"}, "plain"),
        ({"object": "error", "message": "flat", "type": "BadRequestError", "code": 400}, "flat"),
        ({"detail": "fastapi"}, "fastapi"),
        ({"error": {"message": "two\nlines\u2028and\ta tab"}}, "two lines and a tab"),
        ({"error": {"message": "x" * 9000}}, "x" * 500),
        (b"<html>\n  no JSON </html>", "<html> no JSON </html>"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"", "upstream returned 400"),
        ({"detail": [{"loc": ["body"]}]}, '{"detail": [{"loc": ["body"]}]}'),
        (["a"], '["a"]'),
        (b"[" * 5000, "[" * 500),
        ({"error": {"message": 5, "code": [1], "param": {}}}, '{"error": {"message": 5, "code": [1], "param": {}}}'),
    ],
)
def test_the_upstreams_words_are_handed_on(body: object, message: str) -> None:
    """D2: in every shape of error, on one line, cut to a limit."""
    assert refused(400, body) == Failure("invalid_request_error", "http_400", message)


@pytest.mark.rule("D2", "param is the upstream's when it names one.")
@pytest.mark.parametrize(
    ("error", "param"),
    [({"param": "messages[0]"}, "messages[0]"), ({"param": None}, None), ({"param": 7}, None), ({}, None)],
)
def test_param_is_the_upstreams_where_it_names_one(error: dict[str, object], param: str | None) -> None:
    """D2."""
    assert refused(400, {"error": {"message": "m", **error}}).param == param


@pytest.mark.rule("D2", "context_length_exceeded when the upstream says so.")
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(
            {
                "error": {
                    "message": "This model's maximum context length is 8192 tokens. However, your messages resulted in "
                    "9000 tokens. Please reduce the length of the messages.",
                    "type": "invalid_request_error",
                    "param": "messages",
                    "code": "context_length_exceeded",
                }
            },
            id="openai",
        ),
        pytest.param(
            {
                "error": {
                    "message": "This model's maximum context length is 2048 tokens. However, you requested 2100.",
                    "type": "BadRequestError",
                    "param": None,
                    "code": 400,
                }
            },
            id="vllm",
        ),
        pytest.param(
            {
                "object": "error",
                "message": "This model's maximum context length is 2048 tokens.",
                "type": "BadRequestError",
                "param": None,
                "code": 400,
            },
            id="vllm-flat",
        ),
        pytest.param(
            {
                "error": {
                    "message": "The decoder prompt (length 5951) is longer than the maximum model length of 4096. "
                    "Make sure that `max_model_len` is no smaller than the number of text tokens.",
                    "type": "BadRequestError",
                    "param": None,
                    "code": 400,
                }
            },
            id="vllm-input-processor",
        ),
        pytest.param(
            {
                "error": {
                    "code": 400,
                    "message": "request (9412 tokens) exceeds the available context size (8192 tokens), "
                    "try increasing it",
                    "type": "exceed_context_size_error",
                    "n_prompt_tokens": 9412,
                    "n_ctx": 8192,
                }
            },
            id="llama.cpp",
        ),
    ],
)
def test_a_context_that_is_too_long_is_recognised(body: dict[str, Any]) -> None:
    """D2: `context_length_exceeded` when the upstream says so."""
    assert refused(400, body).code == "context_length_exceeded"
    assert refused(422, body).legacy == "http_422"


@pytest.mark.parametrize(
    ("status", "code"), [(401, "authentication_error"), (404, "not_found_error"), (413, "request_too_large")]
)
def test_a_context_overflow_does_not_rename_other_refusals(status: int, code: str) -> None:
    """D2: it is a kind of invalid request."""
    assert refused(status, {"error": {"message": "m", "code": "context_length_exceeded"}}).code == code


def test_an_ordinary_bad_request_is_no_context_overflow() -> None:
    """D2."""
    assert refused(400, {"error": {"message": "temperature must be at most 2"}}).code == "invalid_request_error"


@pytest.mark.parametrize("status", [200, 201, 299])
def test_an_answer_is_a_success(status: int) -> None:
    """D1."""
    outcome = judged(status, {"choices": []}, request_id="req-1")
    assert isinstance(outcome, Success)
    assert (outcome.status, outcome.request_id) == (status, "req-1")


@pytest.mark.rule("D1", "A 2xx that is not JSON is a fault.")
@pytest.mark.parametrize("body", [b"", b"<html></html>", b'{"a":'])
def test_a_200_that_is_no_json_is_a_fault_of_the_upstream(body: bytes) -> None:
    """D1: the line is retried, and the upstream does not count as unavailable."""
    reason = "upstream returned 200 with a body that is not JSON"
    assert judged(200, body) == Retryable(kind="not_json", reason=reason)


LIMITS = RateLimits(requests=Quota(limit=60, remaining=3, reset_seconds=1.5))


@pytest.mark.rule("D9", "What an answer says about rate limits is passed on with its outcome.")
@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, {"choices": []}),
        (200, b"<html></html>"),
        (200, {"error": {"message": "overloaded"}}),
        (200, {"error": {"message": "overloaded", "code": 503}}),
        (429, {"error": {"message": "slow down"}}),
        (409, b""),
        (503, b""),
    ],
)
def test_rate_limits_are_passed_on(status: int, body: object) -> None:
    """D9: of successes too, because they say what is left before the first refusal."""
    outcome = judged(status, body, rate_limits=LIMITS)
    assert isinstance(outcome, Success | Retryable)
    assert outcome.rate_limits is LIMITS


@pytest.mark.parametrize("body", [b'{"choices":[{"message":{"content":"{}"}}]}', b'{"choices":[{"message":{}}]}'])
def test_rate_limits_of_a_classification_are_passed_on(body: bytes) -> None:
    """D9."""
    answer = Answer(status=200, body=body, rate_limits=LIMITS)
    outcome = classify_reply(answer, endpoint=CHAT, kind=ModelKind.CLASSIFICATION)
    assert isinstance(outcome, Success | Retryable)
    assert outcome.rate_limits is LIMITS


@pytest.mark.rule("D1", "A line of the output file has the contract's fields.")
def test_an_output_line_has_the_contracts_fields() -> None:
    """D1."""
    line = output_line("batch_req_1", '"é\\u2028"'.encode(), Success(200, None, b'{"a":1}'))
    assert line == (
        b'{"id":"batch_req_1","custom_id":"\xc3\xa9\\u2028","response":'
        b'{"status_code":200,"request_id":null,"body":{"a":1}},"error":null}\n'
    )
    other = json.loads(output_line("id", b'"c"', Success(201, 'a"\u2028', b"[]")))
    assert other["response"] == {"status_code": 201, "request_id": 'a"\u2028', "body": []}


@pytest.mark.rule("D2", "Messages begin with the old word.")
def test_an_error_line_has_the_contracts_fields() -> None:
    """D2."""
    failure = Failure("not_found_error", "http_404", 'no "model"\n\u2028', "model")
    line = error_line("batch_req_1", b'"c"', failure)
    assert json.loads(line) == {
        "id": "batch_req_1",
        "custom_id": "c",
        "response": None,
        "error": {"code": "not_found_error", "message": '[legacy:http_404] no "model"\n\u2028', "param": "model"},
    }
    assert len(line.decode().splitlines()) == line.count(b"\n") == 1
    bare = json.loads(error_line("id", b'"c"', Failure("c", "l", "m")))
    assert bare["error"] == {"code": "c", "message": "[legacy:l] m", "param": None}


@pytest.mark.rule("D1", "An answer with a surrogate that has no partner is kept, byte for byte.")
@pytest.mark.parametrize("escape", [rb"\ud83d", rb"\uDE00", rb"\\\ud800\ud801\""])
@pytest.mark.parametrize("endpoint", [CHAT, "/v1/embeddings"])
def test_a_lone_surrogate_is_kept(endpoint: str, escape: bytes) -> None:
    """D1: RFC 8259 allows it, the answer is paid for, and another attempt would be paid for again."""
    answer = b'{"choices":[{"text":"cut %b"}],"%b":1,"usage":{"prompt_tokens":3,"completion_tokens":1}}' % (
        escape,
        escape,
    )
    outcome = classify_reply(Answer(status=200, body=answer), endpoint=endpoint)
    assert isinstance(outcome, Success)
    assert outcome.usage.input_tokens == 3
    kept = answer[:-1] + b',"system_fingerprint":null}' if endpoint == CHAT else answer
    assert outcome.body == kept
    json.loads(output_line("id", b'"c"', outcome))


def test_a_surrogate_in_three_bytes_is_kept_as_an_escape() -> None:
    """D1: these bytes are not UTF-8, and no client could read a file with them."""
    outcome = classify_reply(Answer(status=200, body=b'{"data":["\xed\xa0\xbd"]}'), endpoint="/v1/embeddings")
    assert isinstance(outcome, Success)
    assert outcome.body == rb'{"data":["\ud83d"]}'


@pytest.mark.parametrize("body", [rb'{"a":"\ud800}', rb'{"a":\ud800}', b'{"a":"\\\xed\xa0\x80"}', b"\xed\xa0\x80 {}"])
def test_a_surrogate_makes_nothing_json_that_is_none(body: bytes) -> None:
    outcome = classify_reply(Answer(status=200, body=body), endpoint=CHAT)
    assert isinstance(outcome, Retryable)
    assert outcome.kind == "not_json"


def test_an_error_with_a_surrogate_is_read() -> None:
    """D1: a gateway's error in a 200 counts as the status that it names."""
    body = rb'{"error":{"code":400,"message":"bad \ud83d text"}}'
    outcome = classify_reply(Answer(status=200, body=body), endpoint=CHAT)
    assert outcome == Failure("invalid_request_error", "http_400", "bad \ufffd text")


def test_a_classification_with_a_surrogate_is_kept() -> None:
    body = rb'{"choices":[{"message":{"content":"{\"a\":\"x\"}","note":"\ud83d"}}]}'
    outcome = classify_reply(Answer(status=200, body=body), endpoint=CHAT, kind=ModelKind.CLASSIFICATION)
    assert isinstance(outcome, Success)
    assert rb'"note":"\ud83d"' in outcome.body


@pytest.mark.rule("D1", "A compressed answer that cannot be read costs one attempt.")
def test_an_unreadable_answer_is_final() -> None:
    outcome = classify_reply(Fault(kind=FaultKind.UNREADABLE, detail="the encoding 'br'"), endpoint=CHAT)
    assert outcome == Retryable("unreadable", "the encoding 'br'", final=True)
