"""Requests of browsers from other origins: A7."""

from collections.abc import Callable

import pytest
from starlette.datastructures import Headers

from batchline.api.cors import Cors, options_response
from tests.support.api_server import Api


@pytest.mark.rule("A7", "A preflight needs no credentials and allows the two auth headers.")
def test_preflight_needs_no_credentials_and_allows_what_sdks_send(api: Api) -> None:
    """A7"""
    reply = api.call(
        "OPTIONS",
        "/v1/files",
        anonymous=True,
        headers={
            "origin": "https://console.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "x-api-key,X-Stainless-Retry-Count, bad header;",
        },
    )
    assert (reply.status, reply.body) == (204, b"")
    assert reply.headers["access-control-allow-origin"] == "*"
    assert "POST" in reply.headers["access-control-allow-methods"]
    allowed = set(reply.headers["access-control-allow-headers"].split(", "))
    assert {"x-api-key", "x-project-id", "content-type", "authorization", "idempotency-key"} <= allowed
    assert "x-stainless-retry-count" in allowed
    assert "bad" not in reply.headers["access-control-allow-headers"]


def test_errors_too_can_be_read_across_origins(api: Api) -> None:
    """A7"""
    reply = api.call("GET", "/v1/files", anonymous=True, headers={"origin": "https://console.example"})
    assert reply.status == 401
    assert reply.headers["access-control-allow-origin"] == "*"
    exposed = set(reply.headers["access-control-expose-headers"].split(", "))
    assert {"x-request-id", "x-batch-id", "x-batchline-replayed"} <= exposed


@pytest.mark.rule("A7", "Which origins are allowed is a setting.")
def test_only_the_origins_of_the_setting_are_allowed(serve: Callable[..., Api]) -> None:
    """A7"""
    api = serve(cors_origins="https://a.example, https://b.example")
    allowed = api.call("GET", "/healthz", headers={"origin": "https://b.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://b.example"
    assert allowed.headers["vary"] == "origin"
    refused = api.call("OPTIONS", "/healthz", headers={"origin": "https://c.example"})
    assert refused.status == 204
    assert "access-control-allow-origin" not in refused.headers


def test_a_request_without_origin_gets_no_cors_headers() -> None:
    assert Cors(origins=["*"]).headers(None) == {}
    assert Cors(origins=["https://a.example"]).headers(None) == {"vary": "origin"}


def test_preflight_allows_at_most_64_requested_headers() -> None:
    """A long list cannot make a long answer."""
    requested = ",".join(f"x-{n}" for n in range(1000))
    reply = options_response(Headers({"access-control-request-headers": requested}), allow="GET, OPTIONS")
    allowed = reply.headers["access-control-allow-headers"].split(", ")
    assert "x-63" in allowed
    assert "x-64" not in allowed
