"""Answers: what went well, and every error of an operation, told by the errors themselves."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from batchline.api.openapi.schemas import MAYBE_STRING, STRING, Schema, ref
from batchline.api.protocol import HeadersTooLarge
from batchline.domain.errors import (
    ApiError,
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
)

JSON = "application/json"
Part = dict[str, Any]

HEADERS: dict[str, Part] = {
    "x-request-id": {
        "description": "Of this request; name it when you report a problem.",
        "required": True,
        "schema": {"type": "string", "pattern": "^req_[0-9a-f]+$"},
        "example": "req_4f9d0c2b7a6e81350d1c9e8f7a6b5c4d",
    },
    "retry-after": {
        "description": "Seconds to wait, at most 60.",
        "schema": {"type": "integer", "minimum": 1, "maximum": 60},
    },
    "x-should-retry": {"description": "Tells SDKs that asking again is useless.", "schema": {"const": "false"}},
    "x-batch-id": {"description": "The batch that was persisted as failed.", "schema": STRING},
    "x-batchline-replayed": {
        "description": "This is the answer to an earlier create of the same batch.",
        "schema": {"const": "true"},
    },
    "content-range": {"description": "The part this is, or the size of the whole.", "schema": STRING},
    "content-disposition": {"description": "The file's name.", "schema": STRING},
    "content-length": {"description": "Bytes that follow.", "schema": {"type": "integer", "minimum": 0}},
    "accept-ranges": {"description": "Parts can be asked for.", "schema": {"const": "bytes"}},
    "content-security-policy": {"description": "The page loads nothing from elsewhere.", "schema": STRING},
    "allow": {"description": "The methods of the route.", "schema": STRING},
}

_PHRASES = {
    400: "The request is wrong.",
    401: "Credentials are missing.",
    403: "Credentials are not valid; every reason looks the same.",
    404: "There is no such thing, in this project at least.",
    405: "The route has no such method.",
    408: "The request did not come in time.",
    409: "Not in this state.",
    413: "The body is too large.",
    416: "The range lies outside of the file.",
    420: "The upstream's quota is spent.",
    429: "Too much at once, or no money left.",
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
    "MethodNotAllowed": MethodNotAllowed("PUT is not allowed here", headers={"allow": "GET, HEAD, OPTIONS, POST"}),
    "RequestTimeout": RequestTimeout("The request's body stalled for 30 seconds"),
    "HeadersTooLarge": HeadersTooLarge(),
    "InternalError": InternalError(),
    "Unavailable": Unavailable(),
}
"""Told once, and referred to wherever an operation has no other error of that status."""

AUTHENTICATION = (SHARED["MissingCredentials"], SHARED["InvalidCredentials"])
ANYWHERE = tuple(
    SHARED[name] for name in ("BadRequest", "RequestTimeout", "HeadersTooLarge", "InternalError", "Unavailable")
)

ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "code", "param"],
            "additionalProperties": False,
            "properties": {
                "message": STRING | {"description": "For a person to read."},
                "type": {
                    "enum": [
                        "invalid_request_error",
                        "authentication_error",
                        "rate_limit_exceeded",
                        "insufficient_quota",
                        "internal_error",
                    ]
                },
                "code": MAYBE_STRING | {"description": "For a program to decide by."},
                "param": MAYBE_STRING | {"description": "The field, parameter or header at fault."},
                "line": {"type": "integer", "minimum": 1, "description": "The first offending line of an input file."},
            },
        }
    },
    "example": MissingCredentials().body(),
}


def answer(description: str, content: dict[str, Part] | None = None, *, headers: Iterable[str] = ()) -> Part:
    """With the header that every answer has."""
    named = {name: {"$ref": f"#/components/headers/{name}"} for name in ("x-request-id", *headers)}
    return {"description": description, "headers": named} | ({"content": content} if content else {})


def json_answer(description: str, schema: str, *, headers: Iterable[str] = ()) -> Part:
    return answer(description, {JSON: {"schema": ref(schema)}}, headers=headers)


def error_answers(errors: Sequence[ApiError]) -> dict[str, Part]:
    """By status, in order. An error that the upstream chose may come with any status from 400 to 499."""
    grouped: dict[int, list[ApiError]] = defaultdict(list)
    for error in errors:
        grouped[error.status].append(error)
    told = {str(status): _of_status(grouped[status]) for status in sorted(grouped)}
    passed_on = [error for error in errors if isinstance(error, Refused)]
    return told | ({"4XX": _told("The upstream refused the request.", passed_on)} if passed_on else {})


def shared_answers() -> dict[str, Part]:
    return {name: _told(_PHRASES[error.status], [error]) for name, error in SHARED.items()}


def _of_status(errors: list[ApiError]) -> Part:
    name = next((name for name, error in SHARED.items() if [error] == errors), None)
    return _told(_PHRASES[errors[0].status], errors) if name is None else {"$ref": f"#/components/responses/{name}"}


def _told(phrase: str, errors: Sequence[ApiError]) -> Part:
    headers = dict.fromkeys(name for error in errors for name in _headers_of(error))
    examples = {_label(error): {"value": error.body()} for error in errors}
    return answer(phrase, {JSON: {"schema": _narrowed(errors), "examples": examples}}, headers=headers)


def _headers_of(error: ApiError) -> Iterable[str]:
    return ("x-batch-id", "x-batchline-replayed") if isinstance(error, InvalidInput) else error.headers


def _narrowed(errors: Sequence[ApiError]) -> Schema:
    """The envelope, with the types and codes that these errors have and no other."""
    properties: Schema = {
        "type": {"enum": _distinct(error.type for error in errors)},
        "code": {"enum": _distinct(error.code for error in errors)},
    }
    if not any(isinstance(error, InvalidInput) for error in errors):
        properties["line"] = False
    return {"allOf": [ref("Error"), {"properties": {"error": {"properties": properties}}}]}


def _distinct(values: Iterable[str | None]) -> list[str | None]:
    return list(dict.fromkeys(values))


def _label(error: ApiError) -> str:
    name = error.code or type(error).__name__
    if isinstance(error, InvalidInput):
        return f"{name}, line"
    return f"{name}, {error.param}" if error.param else name
