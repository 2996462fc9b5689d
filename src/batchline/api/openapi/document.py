"""Puts the OpenAPI document together."""

from collections.abc import Sequence
from typing import Any

from batchline import __version__
from batchline.api.openapi.answers import HEADERS, Part, error_answers, shared_answers
from batchline.api.openapi.operation import ADMINISTRATOR, CALLS, KEY, TAGS, Operation
from batchline.api.openapi.operations import OPERATIONS, endpoint_operation
from batchline.api.openapi.schemas import schemas
from batchline.domain.embedded_model import EMBEDDED_MODEL

_ABOUT = """OpenAI's Files and Batch API on your own machines.

Requests carry a key in `x-api-key` and its project in `x-project-id`{bearer}. Every answer carries `x-request-id`. \
Every error has the same envelope (`ErrorBody`): decide by `type` and `code`, read `message`. Objects of another \
project look as if they did not exist. Times are Unix seconds. Every GET can be a HEAD, and OPTIONS is answered \
without credentials. An unknown route is answered with 404 and the code `not_found`, another method of a known route \
with 405 and the code `method_not_allowed`."""

_SCHEMES = {
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "A key of the project."},
    "projectId": {"type": "apiKey", "in": "header", "name": "x-project-id", "description": "The project, a UUID."},
    "administrator": {"type": "http", "scheme": "bearer", "description": "The administrator's token."},
}
_BEARER = {"type": "http", "scheme": "bearer", "description": "A key alone; it acts for its own project."}
_ABOUT_BEARER = ", or the key alone as a bearer token"


def describe(*, bearer: bool, endpoints: Sequence[str] = (), model: str = EMBEDDED_MODEL) -> Part:
    """Return the document.

    ``bearer`` says whether the service also accepts keys as bearer tokens (A13). ``endpoints`` are those that lines of
    batches may use, which are served synchronously too (E4). ``model`` is the model of the examples.
    """
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "batchline",
            "version": __version__,
            "summary": "Files and batches, OpenAI-compatible.",
            "description": _ABOUT.format(bearer=_ABOUT_BEARER if bearer else ""),
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "paths": _paths(bearer=bearer, endpoints=endpoints),
        "components": {
            "schemas": schemas(),
            "responses": shared_answers(),
            "headers": HEADERS,
            "securitySchemes": _SCHEMES | ({"bearer": _BEARER} if bearer else {}),
        },
    }
    named: Part = _with_model(document, model)
    return named


def _with_model(part: Any, model: str) -> Any:
    """Return a part of the document whose examples name another model than the embedded one."""
    if isinstance(part, dict):
        return {name: _with_model(value, model) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return [_with_model(value, model) for value in part]
    return model if part == EMBEDDED_MODEL else part


def _paths(*, bearer: bool, endpoints: Sequence[str]) -> dict[str, Part]:
    paths: dict[str, Part] = {}
    for tag, operations in OPERATIONS.items():
        for operation in operations:
            method, _, path = operation.route.partition(" ")
            paths.setdefault(path, {})[method.lower()] = _operation(operation, tag=tag, bearer=bearer)
    for endpoint in endpoints:
        if endpoint not in paths:
            paths[endpoint] = {"post": _operation(endpoint_operation(endpoint), tag=CALLS, bearer=bearer)}
    return paths


def _operation(operation: Operation, *, tag: str, bearer: bool) -> Part:
    optional = {
        "description": operation.description,
        "parameters": list(operation.parameters),
        "requestBody": operation.body,
    }
    return {
        "operationId": operation.id,
        "tags": [tag],
        "summary": operation.summary,
        **{name: value for name, value in optional.items() if value},
        "security": _security(operation, bearer=bearer),
        "responses": operation.answers | error_answers(operation.all_errors),
    }


def _security(operation: Operation, *, bearer: bool) -> list[Part]:
    """Return the alternatives that a request may authenticate with; an empty one means no credentials."""
    if operation.credentials == KEY:
        return [{"apiKey": [], "projectId": []}, *([{"bearer": []}] if bearer else [])]
    return [{}, {"administrator": []}] if operation.credentials == ADMINISTRATOR else []
