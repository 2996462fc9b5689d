"""Every error a client can be answered with: A1, A2, A4, A6, A10, A12, B2, B6, C3, C8."""

import importlib
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import to_builtins

import batchline
from batchline.domain import errors
from batchline.domain.errors import (
    ApiError,
    BadGateway,
    BatchNotFound,
    Conflict,
    FileDamaged,
    FileNotFound,
    ForgedRequest,
    GatewayTimeout,
    HeadersTooLarge,
    InsufficientQuota,
    InternalError,
    InvalidCredentials,
    InvalidInput,
    InvalidMultipart,
    InvalidRequest,
    MethodNotAllowed,
    MissingCredentials,
    MissingScope,
    NotFound,
    OtherProject,
    RangeNotSatisfiable,
    RateLimited,
    Refused,
    RequestTimeout,
    ResultsUnavailable,
    StorageFailed,
    StorageFull,
    TooLarge,
    TooManyConnections,
    Unavailable,
    UrlTooLong,
)
from batchline.domain.wire import ErrorBody

TYPES = {
    "invalid_request_error",
    "authentication_error",
    "rate_limit_exceeded",
    "insufficient_quota",
    "internal_error",
}
EXAMPLES = [
    (InvalidRequest("m"), 400, "invalid_request_error", "invalid_request_error"),
    (InvalidInput("m", line=3), 400, "invalid_request_error", "invalid_request_error"),
    (InvalidMultipart("m"), 400, "invalid_request_error", "invalid_multipart"),
    (MissingCredentials(), 401, "authentication_error", None),
    (InvalidCredentials(), 403, "authentication_error", None),
    (MissingScope("batch"), 403, "authentication_error", None),
    (ForgedRequest(), 403, "authentication_error", None),
    (NotFound("m"), 404, "invalid_request_error", "not_found"),
    (FileNotFound("file-1"), 404, "invalid_request_error", "file_not_found"),
    (BatchNotFound("batch_1"), 404, "invalid_request_error", "batch_not_found"),
    (MethodNotAllowed("m"), 405, "invalid_request_error", "method_not_allowed"),
    (RequestTimeout("m"), 408, "invalid_request_error", "request_timeout"),
    (Conflict("m", code="batch_not_held"), 409, "invalid_request_error", "batch_not_held"),
    (OtherProject(), 409, "invalid_request_error", None),
    (ResultsUnavailable("batch_1"), 410, "invalid_request_error", "results_unavailable"),
    (TooLarge("m"), 413, "invalid_request_error", "request_too_large"),
    (StorageFull(9, scope="project"), 413, "invalid_request_error", "storage_quota_exceeded"),
    (UrlTooLong(), 414, "invalid_request_error", "url_too_long"),
    (RangeNotSatisfiable("m"), 416, "invalid_request_error", "range_not_satisfiable"),
    (RateLimited("m", retry_after=5), 429, "rate_limit_exceeded", "rate_limit_exceeded"),
    (InsufficientQuota(), 429, "insufficient_quota", "insufficient_quota"),
    (HeadersTooLarge(), 431, "invalid_request_error", "headers_too_large"),
    (Refused(404, "m", code="not_found_error"), 404, "invalid_request_error", "not_found_error"),
    (InternalError(), 500, "internal_error", None),
    (StorageFailed(), 500, "internal_error", "storage_error"),
    (FileDamaged("file-1"), 500, "internal_error", "storage_error"),
    (TooManyConnections(), 503, "internal_error", "service_unavailable"),
    (BadGateway("m"), 502, "internal_error", "upstream_error"),
    (GatewayTimeout("m"), 504, "internal_error", "upstream_timeout"),
    (Unavailable(), 503, "internal_error", "service_unavailable"),
]


def _envelope(error: ApiError) -> dict[str, Any]:
    body = to_builtins(ErrorBody.from_error(error))
    assert set(body) == {"error"}
    fields: dict[str, Any] = body["error"]
    return fields


@pytest.mark.rule("A6", "Every error is returned in one envelope.")
@pytest.mark.parametrize(("error", "status", "kind", "code"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_every_error_fills_the_envelope(error: ApiError, status: int, kind: str, code: str | None) -> None:
    """A6: message and type are never null, the type is one of the contract's."""
    assert error.status == status
    envelope = _envelope(error)
    assert {"message", "type", "code", "param"} <= set(envelope)
    assert envelope["message"] == str(error)
    assert envelope["message"]
    assert (envelope["type"], envelope["code"]) == (kind, code)
    assert kind in TYPES
    assert ("line" in envelope) is isinstance(error, InvalidInput)


def _import_package() -> None:
    for module in pkgutil.walk_packages(batchline.__path__, "batchline."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def _subclasses(parent: type[ApiError]) -> Iterator[type[ApiError]]:
    for child in parent.__subclasses__():
        yield child
        yield from _subclasses(child)


def _drawn() -> dict[str, tuple[str, str]]:
    """Return the parent and the status of every class in the drawing, by the column at which its name begins."""
    drawn: dict[str, tuple[str, str]] = {}
    path = [(4, "ApiError")]
    for line in (errors.__doc__ or "").splitlines():
        node = re.match(r"[ │]*[├└]── (?P<name>\w+) +(?P<status>[0-9x]{3}) ", line)
        if node:
            column = node.start("name")
            path = [(start, name) for start, name in path if start < column]
            drawn[node["name"]] = (path[-1][1], node["status"])
            path.append((column, node["name"]))
    return drawn


def test_the_drawing_has_every_error_of_the_package_with_its_parent_and_status() -> None:
    """A6: an error that is added anywhere must be added to the drawing, under its parent, and to the examples."""
    _import_package()
    classes = set(_subclasses(ApiError))
    assert {kind.__module__ for kind in classes} == {errors.__name__}
    assert classes == {type(example[0]) for example in EXAMPLES}
    actual = {
        kind.__name__: (kind.__base__.__name__ if kind.__base__ else "", "4xx" if kind is Refused else str(kind.status))
        for kind in classes
    }
    assert _drawn() == actual


def test_the_messages_are_the_contracts() -> None:
    """A1, A2, B6, C8."""
    assert str(MissingCredentials()) == "Missing authentication headers"
    assert str(InvalidCredentials()) == "Invalid credentials"
    assert str(FileNotFound("file-1")) == "File file-1 not found"
    assert str(BatchNotFound("batch_1")) == "Batch not found: batch_1"


def test_a_line_is_named_only_where_one_is_to_blame() -> None:
    """A6, C3, C4."""
    assert _envelope(InvalidInput("m", line=3)) == {
        "message": "m",
        "type": "invalid_request_error",
        "code": "invalid_request_error",
        "param": None,
        "line": 3,
    }
    assert "line" not in _envelope(InvalidInput("m", line=None))


def test_a_code_and_a_param_can_be_told() -> None:
    """B2."""
    error = _envelope(TooLarge("m", code="file_too_large", param="file"))
    assert (error["code"], error["param"]) == ("file_too_large", "file")


def test_the_sdks_do_not_retry_a_conflict() -> None:
    """A10."""
    assert Conflict("m", code="batch_not_held").headers == {"x-should-retry": "false"}


@pytest.mark.parametrize(("wanted", "told"), [(1, "1"), (60, "60"), (61, "60"), (9999, "60")])
def test_throttling_says_how_long_to_wait(wanted: int, told: str) -> None:
    """A4, A10: a minute at most."""
    assert RateLimited("m", retry_after=wanted).headers == {"retry-after": told}


def test_an_empty_purse_is_not_worth_a_retry() -> None:
    """A3, A10."""
    assert InsufficientQuota().headers == {"x-should-retry": "false"}


@pytest.mark.parametrize(
    ("status", "code", "kind", "headers"),
    [
        (400, "context_length_exceeded", "invalid_request_error", {}),
        (401, "authentication_error", "authentication_error", {}),
        (409, "invalid_request_error", "invalid_request_error", {"x-should-retry": "false"}),
        (429, "insufficient_quota", "insufficient_quota", {"x-should-retry": "false"}),
        (429, "rate_limit_exceeded", "rate_limit_exceeded", {"retry-after": "1"}),
    ],
)
def test_a_refusal_of_the_upstream_keeps_its_status(status: int, code: str, kind: str, headers: dict[str, str]) -> None:
    """E2, A6, A10: the type is one of the contract's, and the SDKs retry only what is worth it."""
    refused = Refused(status, "m", code=code)
    assert (refused.status, refused.type, refused.headers) == (status, kind, headers)


@pytest.mark.parametrize(("wanted", "told"), [(0.2, "1"), (7.1, "8"), (9999, "60")])
def test_an_upstreams_throttling_is_passed_on_with_its_wait(wanted: float, told: str) -> None:
    """A10: whole seconds, a minute at most."""
    refused = Refused(429, "m", code="rate_limit_exceeded", retry_after=wanted)
    assert refused.headers == {"retry-after": told}


def test_an_outage_is_worth_a_retry() -> None:
    assert Unavailable().headers == {"retry-after": "2"}


def test_errors_do_not_share_headers() -> None:
    """One answer's headers must never turn up in another's."""
    first = InvalidRequest("m", headers={"a": "b"})
    first.headers["c"] = "d"
    assert InvalidRequest("m").headers == {}
