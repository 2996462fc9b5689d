"""What one operation says of itself, and the parts it says it with."""

from typing import Any

from msgspec import Struct

from batchline.api.openapi.answers import ANYWHERE, AUTHENTICATION, Part
from batchline.api.openapi.schemas import Schema, ref
from batchline.domain.errors import ApiError

KEY, ADMINISTRATOR, NOBODY = "key", "administrator", "nobody"
"""Who is asked for."""

FILES, BATCHES, CALLS, MODELS, SERVICE = "Files", "Batches", "Synchronous calls", "Models", "Service"
TAGS = {
    FILES: "Inputs of batches, and what they wrote.",
    BATCHES: "Many requests at once, answered within a day.",
    CALLS: "One request, answered now by the upstream that serves the model. Nothing is retried.",
    MODELS: "What may be asked.",
    SERVICE: "For whoever runs it.",
}


class Operation(Struct, frozen=True, kw_only=True):
    method: str
    path: str
    id: str
    tag: str
    summary: str
    description: str = ""
    asks_for: str = KEY
    parameters: tuple[Part, ...] = ()
    body: Part | None = None
    answers: dict[str, Part]
    errors: tuple[ApiError, ...] = ()

    @property
    def all_errors(self) -> tuple[ApiError, ...]:
        return (*(AUTHENTICATION if self.asks_for == KEY else ()), *self.errors, *ANYWHERE)


def parameter(name: str, place: str, schema: Schema, description: str, **more: Any) -> Part:
    required = {"required": True} if place == "path" else {}
    return {"name": name, "in": place, "schema": schema, "description": description} | required | more


def in_query(name: str, schema: Schema, description: str) -> Part:
    return parameter(name, "query", schema, description)


def body(media_type: str, schema: str, example: object = None) -> Part:
    media: Part = {"schema": ref(schema)} | ({} if example is None else {"example": example})
    return {"required": True, "content": {media_type: media}}
