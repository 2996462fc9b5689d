"""Describes answers: successes, and the errors of an operation, derived from the errors themselves."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct, to_builtins

from batchline.api.openapi.schemas import STRING, Schema, ref
from batchline.api.responses import JSON
from batchline.domain.errors import (
    ApiError,
    HeadersTooLarge,
    InternalError,
    InvalidCredentials,
    InvalidInput,
    InvalidRequest,
    MethodNotAllowed,
    MissingCredentials,
    NotFound,
    Refused,
    RequestTimeout,
    Unavailable,
    UrlTooLong,
)
from batchline.domain.wire import ErrorBody

Part = dict[str, Any]

HEADERS: dict[str, Part] = {
    "x-request-id": {
        "description": "Id of this request; include it when you report a problem.",
        "required": True,
        "schema": {"type": "string", "pattern": "^req_[0-9a-f]+$"},
        "example": "req_4f9d0c2b7a6e81350d1c9e8f7a6b5c4d",
    },
    "retry-after": {
        "description": "Seconds to wait, at most 60.",
        "schema": {"type": "integer", "minimum": 1, "maximum": 60},
    },
    "x-should-retry": {"description": "Tells SDKs not to retry.", "schema": {"const": "false"}},
    "x-batch-id": {"description": "The batch that was persisted as failed.", "schema": STRING},
    "x-batchline-replayed": {
        "description": "This is the answer to an earlier create of the same batch.",
        "schema": {"const": "true"},
    },
    "content-range": {"description": "The range of this part, or the size of the whole file.", "schema": STRING},
    "content-disposition": {"description": "The file's name.", "schema": STRING},
    "content-length": {"description": "Size of the body in bytes.", "schema": {"type": "integer", "minimum": 0}},
    "accept-ranges": {"description": "Ranges of the file can be requested.", "schema": {"const": "bytes"}},
    "content-security-policy": {"description": "The page loads nothing from other origins.", "schema": STRING},
    "allow": {"description": "The methods of the route.", "schema": STRING},
}

_PHRASES = {
    400: "The request is invalid.",
    401: "Credentials are missing.",
    402: "The upstream's quota is spent.",
    403: "The credentials are invalid; the answer is the same for every reason.",
    404: "It does not exist in this project.",
    405: "The route does not have this method.",
    408: "The request took too long to arrive.",
    409: "It is not possible in the current state.",
    410: "What holds the results was deleted or has expired.",
    413: "The body is too large.",
    414: "The URL is too long.",
    416: "The range lies outside of the file.",
    420: "The upstream's quota is spent.",
    429: "Too many requests in parallel, or no balance left.",
    431: "The headers are too large.",
    500: "The service failed.",
    502: "The upstream failed or cannot be reached.",
    503: "The service cannot do this right now.",
    504: "The upstream took too long.",
}

SHARED: dict[str, ApiError] = {
    "MissingCredentials": MissingCredentials(),
    "InvalidCredentials": InvalidCredentials(),
    "BadRequest": InvalidRequest("Invalid HTTP request received."),
    "UnknownRoute": NotFound("Unknown route: GET /v2/files"),
    "MethodNotAllowed": MethodNotAllowed(
        "PUT is not allowed here; allowed: GET, HEAD, OPTIONS, POST", headers={"allow": "GET, HEAD, OPTIONS, POST"}
    ),
    "RequestTimeout": RequestTimeout("The request's body stalled for 30 seconds"),
    "UrlTooLong": UrlTooLong(),
    "HeadersTooLarge": HeadersTooLarge(),
    "InternalError": InternalError(),
    "Unavailable": Unavailable(),
}
"""Errors that are described once, and referenced by every operation that has no other error of that status."""

AUTHENTICATION_ERRORS = (SHARED["MissingCredentials"], SHARED["InvalidCredentials"])
COMMON_ERRORS = tuple(
    SHARED[name]
    for name in ("BadRequest", "RequestTimeout", "UrlTooLong", "HeadersTooLarge", "InternalError", "Unavailable")
)


def answer(description: str, content: dict[str, Part] | None = None, *, headers: Iterable[str] = ()) -> Part:
    """Return an answer with the given headers and ``x-request-id``, which every answer has."""
    named = {name: {"$ref": f"#/components/headers/{name}"} for name in ("x-request-id", *headers)}
    return {"description": description, "headers": named} | ({"content": content} if content else {})


def json_answer(description: str, kind: type[Struct], *, headers: Iterable[str] = ()) -> Part:
    """Return an answer whose body is the JSON of a struct."""
    return answer(description, {JSON: {"schema": ref(kind)}}, headers=headers)


def error_answers(errors: Sequence[ApiError]) -> dict[str, Part]:
    """Return the answers by status, in order.

    An error that is passed on from the upstream may have any status from 400 to 499, so it is also described as 4XX.
    """
    grouped: dict[int, list[ApiError]] = defaultdict(list)
    for error in errors:
        grouped[error.status].append(error)
    by_status = {str(status): _status_answer(grouped[status]) for status in sorted(grouped)}
    passed_on = [error for error in errors if isinstance(error, Refused)]
    return by_status | ({"4XX": _error_answer("The upstream refused the request.", passed_on)} if passed_on else {})


def shared_answers() -> dict[str, Part]:
    """Return the answers that operations refer to, by name."""
    return {name: _error_answer(_PHRASES[error.status], [error]) for name, error in SHARED.items()}


def _status_answer(errors: list[ApiError]) -> Part:
    name = next((name for name, error in SHARED.items() if [error] == errors), None)
    return (
        _error_answer(_PHRASES[errors[0].status], errors)
        if name is None
        else {"$ref": f"#/components/responses/{name}"}
    )


def _error_answer(phrase: str, errors: Sequence[ApiError]) -> Part:
    headers = dict.fromkeys(name for error in errors for name in _headers_of(error))
    examples = {_label(error): {"value": to_builtins(ErrorBody.from_error(error))} for error in errors}
    return answer(phrase, {JSON: {"schema": _narrowed(errors), "examples": examples}}, headers=headers)


def _headers_of(error: ApiError) -> Iterable[str]:
    return ("x-batch-id", "x-batchline-replayed") if isinstance(error, InvalidInput) else error.headers


def _narrowed(errors: Sequence[ApiError]) -> Schema:
    """Return the schema of the envelope, restricted to the types and codes of these errors."""
    properties: Schema = {
        "type": {"enum": _distinct(error.type for error in errors)},
        "code": {"enum": _distinct(error.code for error in errors)},
    }
    if not any(isinstance(error, InvalidInput) for error in errors):
        # Not ``false``, which means the same: generators of clients cannot read a boolean in place of a schema.
        properties["line"] = {"not": {}}
    return {"allOf": [ref(ErrorBody), {"properties": {"error": {"properties": properties}}}]}


def _distinct(values: Iterable[str | None]) -> list[str | None]:
    return list(dict.fromkeys(values))


def _label(error: ApiError) -> str:
    name = error.code or type(error).__name__
    if isinstance(error, InvalidInput):
        return f"{name}, line"
    return f"{name}, {error.param}" if error.param else name
