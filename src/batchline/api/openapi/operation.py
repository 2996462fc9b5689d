"""Defines what the document says of one operation, and helpers for its parameters and body."""

from typing import Any

from msgspec import Struct

from batchline.api.openapi.answers import AUTHENTICATION_ERRORS, COMMON_ERRORS, Part
from batchline.api.openapi.schemas import Schema, ref
from batchline.domain.errors import ApiError

KEY, ADMINISTRATOR, ANONYMOUS = "key", "administrator", "anonymous"
"""Whose credentials an operation requires."""

FILES, BATCHES, CALLS, MODELS, SERVICE = "Files", "Batches", "Synchronous calls", "Models", "Service"
TAGS = {
    FILES: "Input files of batches, and their output and error files.",
    BATCHES: "Many requests in one file, answered within a day.",
    CALLS: "One request, answered now by the upstream that serves the model. Nothing is retried.",
    MODELS: "The models that requests may name.",
    SERVICE: "For the operator of the service.",
}


class Operation(Struct, frozen=True, kw_only=True):
    """One method of one path."""

    route: str
    """Method and path: ``GET /v1/files``."""
    id: str
    summary: str
    description: str = ""
    credentials: str = KEY
    parameters: tuple[Part, ...] = ()
    body: Part | None = None
    answers: dict[str, Part]
    errors: tuple[ApiError, ...] = ()

    @property
    def all_errors(self) -> tuple[ApiError, ...]:
        """Its own errors, those of authentication if it needs a key, and those that every operation has."""
        return (*(AUTHENTICATION_ERRORS if self.credentials == KEY else ()), *self.errors, *COMMON_ERRORS)


def parameter(name: str, place: str, schema: Schema, description: str, **more: Any) -> Part:
    """Return a parameter in the path, the query or a header; those in the path are required."""
    required = {"required": True} if place == "path" else {}
    return {"name": name, "in": place, "schema": schema, "description": description} | required | more


def in_query(name: str, schema: Schema, description: str) -> Part:
    return parameter(name, "query", schema, description)


def body(media_type: str, kind: type[Struct], example: object = None) -> Part:
    """Return a required request body with the schema of a struct."""
    media: Part = {"schema": ref(kind)} | ({} if example is None else {"example": example})
    return {"required": True, "content": {media_type: media}}
