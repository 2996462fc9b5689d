"""Whether a 429 is about quota or about a rate, from the texts of many servers: D2."""

import json
from typing import Any

import pytest

from batchline.domain.outcomes import Failure, Retryable, classify_reply
from batchline.domain.replies import Answer
from batchline.domain.upstream_errors import read_error

OPENAI = (
    "You exceeded your current quota, please check your plan and billing details. For more information on this error, "
    "read the docs: https://platform.openai.com/docs/guides/error-codes/api-errors."
)
GEMINI = (
    "You exceeded your current quota, please check your plan and billing details. For more information on this error, "
    "head to: https://ai.google.dev/gemini-api/docs/rate-limits."
)
GEMINI_METRIC = (
    "\n* Quota exceeded for metric: generativelanguage.googleapis.com/generate_content_free_tier_requests, limit: 10"
)


def error(message: str, code: object = None, kind: str | None = None, **more: object) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code, **more}}


QUOTA = {
    "openai": error(OPENAI, "insufficient_quota", "insufficient_quota"),
    "openai, rewritten by a gateway": error(OPENAI, "rate_limit_exceeded", "rate_limit_error"),
    "openai, billing limit": error("Billing hard limit has been reached", "billing_hard_limit_reached"),
    "openai, not active": error(
        "Your account is not active, please check your billing details on our website.", "billing_not_active"
    ),
    "openai, plain text": OPENAI,
    "litellm": error(f"litellm.RateLimitError: RateLimitError: OpenAIException - {OPENAI}", "429", "throttling_error"),
    "litellm, older": error(
        f"litellm.RateLimitError: RateLimitError: OpenAIException - Error code: 429 - {{'error': {{'message': "
        f"'{OPENAI}', 'type': 'insufficient_quota', 'param': None, 'code': 'insufficient_quota'}}}}",
        "429",
    ),
    "litellm, budget": error(
        "Budget has been exceeded! Current cost: 0.02, Max budget: 0.01", "429", "budget_exceeded"
    ),
    "openrouter, quoting the provider": error(
        "Provider returned error", 429, metadata={"raw": json.dumps(error(OPENAI)), "provider_name": "OpenAI"}
    ),
    "openrouter": error("Insufficient credits. Add more using https://openrouter.ai/settings/credits", 429),
    "deepseek": error("Insufficient Balance", "invalid_request_error", "unknown_error"),
    "moonshot": error(
        "Your account org-1 <ak-1> is suspended, please check your plan and billing details",
        kind="exceeded_current_quota_error",
    ),
    "siliconflow": {"code": 30001, "message": "Sorry, your account balance is insufficient", "data": None},
    "anthropic behind a gateway": error("Your credit balance is too low to access the Anthropic API.", 429),
    "xai": {
        "code": "Some resource has been exhausted",
        "error": "Your team has either used all available credits or reached its monthly spending limit.",
    },
    "together": error("Credit limit exceeded, please navigate to https://api.together.xyz/settings/billing", 429),
    "hugging face": {"error": "You have exceeded your monthly included credits for Inference Providers."},
    "one-api": error("user quota is not enough", "insufficient_user_quota", "one_api_error"),
    "a gateway's own words": error("Monthly quota exceeded", 429),
}

RATE = {
    "openai, requests": error(
        "Rate limit reached for gpt-4o in organization org-1 on requests per min (RPM): Limit 3, Used 3, Requested 1. "
        "Please try again in 20s. Visit https://platform.openai.com/account/rate-limits to learn more. You can "
        "increase your rate limit by adding a payment method to your account at "
        "https://platform.openai.com/account/billing.",
        "rate_limit_exceeded",
        "requests",
    ),
    "openai, tokens": error(
        "Request too large for gpt-4o in organization org-1 on tokens per min (TPM): Limit 30000, Requested 40000.",
        "rate_limit_exceeded",
        "tokens",
    ),
    "azure": error(
        "Requests to the ChatCompletions_Create Operation under Azure OpenAI API version 2024-02-15-preview have "
        "exceeded token rate limit of your current OpenAI S0 pricing tier. Please retry after 6 seconds. Please go "
        "here: https://aka.ms/oai/quotaincrease if you would like to further increase the default rate limit.",
        "429",
    ),
    "azure, api management": {"statusCode": 429, "message": "Rate limit is exceeded. Try again in 51 seconds."},
    "groq": error(
        "Rate limit reached for model `llama-3.3-70b-versatile` in organization `org_1` service tier `on_demand` on "
        "tokens per day (TPD): Limit 100000, Used 99500, Requested 1200. Please try again in 10m4.8s. Need more "
        "tokens? Upgrade to Dev Tier today at https://console.groq.com/settings/billing",
        "rate_limit_exceeded",
        "tokens",
    ),
    "litellm, cooldown": error(
        "No deployments available for selected model, Try again in 5 seconds. Passed model=gpt-4o.", "429", "None"
    ),
    "litellm, gemini": error(
        "litellm.RateLimitError: litellm.RateLimitError: vertex_ai_betaException - b'"
        + json.dumps(error(GEMINI + GEMINI_METRIC + "\nPlease retry in 34.07s.", 429, status="RESOURCE_EXHAUSTED"))
        + "'",
        "429",
        "throttling_error",
    ),
    "vllm router": error("Too many requests. The server is overloaded.", 429, "TooManyRequestsError"),
    "gemini": [
        error(GEMINI + GEMINI_METRIC + "\nPlease retry in 34.07s.", 429, status="RESOURCE_EXHAUSTED")  # in a list
    ],
    "gemini, short": [error(GEMINI, 429, status="RESOURCE_EXHAUSTED")],
    "gemini, far behind the first 500 characters": [error(OPENAI + " " * 900 + GEMINI_METRIC, 429)],
    "gemini, older": [
        error("Resource has been exhausted (e.g. check quota).", 429, status="RESOURCE_EXHAUSTED"),
    ],
    "vertex": error(
        "Quota exceeded for aiplatform.googleapis.com/generate_content_requests_per_minute_per_project_per_base_model "
        "with base model: gemini-pro. Please submit a quota increase request.",
        429,
    ),
    "google, metric": error("Quota exceeded for quota metric 'Requests' and limit 'Requests per minute'", 429),
    "openrouter, free models": error(
        "Rate limit exceeded: free-models-per-day. Add 10 credits to unlock 1000 free model requests per day", 429
    ),
    "openrouter, provider": error(
        "Provider returned error",
        429,
        metadata={"raw": "deepseek/deepseek-r1 is temporarily rate-limited upstream. Please retry shortly"},
    ),
    "together": error(
        "You have reached the rate limit specific to this model meta-llama/Llama-3.3-70B. The maximum rate limit for "
        "this model is 0.6 queries per minute.",
        kind="model_rate_limit",
    ),
    "dashscope": error("Allocated quota exceeded, please increase your quota limit.", "limit_requests"),
    "mistral": {"message": "Requests rate limit exceeded"},
    "cerebras": {
        "message": "Tokens per day limit exceeded - too many tokens processed.",
        "code": "token_quota_exceeded",
    },
    "a gateway's own words": error("Daily quota exceeded", 429),
    "nothing": "",
    "plain text": "429 Too Many Requests",
}


def body_of(document: object) -> bytes:
    return document.encode() if isinstance(document, str) else json.dumps(document).encode()


@pytest.mark.rule("D2", "A 429 whose text is about quota is insufficient_quota, whatever its code and type.")
@pytest.mark.parametrize("name", QUOTA)
def test_a_429_whose_text_says_quota_is_final(name: str) -> None:
    """D2: no waiting brings the money back."""
    outcome = classify_reply(Answer(status=429, body=body_of(QUOTA[name])), endpoint="/v1/chat/completions")
    assert isinstance(outcome, Failure)
    assert (outcome.code, outcome.legacy, outcome.unavailable) == ("insufficient_quota", "http_429", False)


@pytest.mark.rule("D2", "A 429 whose text is about a rate is throttling, even if it speaks of quota or billing.")
@pytest.mark.parametrize("name", RATE)
def test_a_429_whose_text_says_a_rate_is_throttling(name: str) -> None:
    """D2: a line that only has to wait must not fail."""
    outcome = classify_reply(Answer(status=429, body=body_of(RATE[name])), endpoint="/v1/chat/completions")
    assert isinstance(outcome, Retryable)
    assert (outcome.kind, outcome.throttled, outcome.unavailable) == ("http_429", True, True)


def test_the_search_for_quota_is_bounded() -> None:
    """D2: an upstream that sends 16 MiB with its 429 does not occupy the worker."""
    body = b"x" * 10_000 + b"insufficient_quota"
    assert isinstance(classify_reply(Answer(status=429, body=body), endpoint="/v1/embeddings"), Retryable)


@pytest.mark.parametrize("status", [401, 403, 404, 400, 503])
def test_only_a_429_is_searched_for_quota(status: int) -> None:
    """D2: other statuses have their own row in the table."""
    outcome = classify_reply(Answer(status=status, body=OPENAI.encode()), endpoint="/v1/embeddings")
    assert not isinstance(outcome, Failure) or outcome.code != "insufficient_quota"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'[{"error":{"code":400,"message":"API key not valid."}}]', {"code": 400, "message": "API key not valid."}),
        (b'[{"message":"a"},{"message":"b"}]', {}),
        (b"[]", {}),
        (b"[1]", {}),
    ],
)
def test_an_error_object_in_a_list_is_read(body: bytes, expected: dict[str, Any]) -> None:
    """D2: Gemini sends one."""
    assert read_error(body) == expected
