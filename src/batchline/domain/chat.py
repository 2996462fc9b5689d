"""Checks a request before it is sent to an upstream (D6), and rewrites its fields."""

from typing import Annotated, Any, Literal

from msgspec import DecodeError, Meta, Raw, Struct
from msgspec.json import Decoder, encode

from batchline.domain.endpoints import CHAT
from batchline.domain.models import MAX_MODEL_CHARACTERS, Catalog, Model
from batchline.domain.outcomes import Failure

Role = Literal["user", "assistant", "system", "tool", "developer"]


class _Message(Struct):
    role: Role


class _ModelRequest(Struct):
    model: Annotated[str, Meta(min_length=1)]


class _ChatRequest(_ModelRequest):
    messages: Annotated[list[_Message], Meta(min_length=1)]


_model_request = Decoder(_ModelRequest)
_chat_request = Decoder(_ChatRequest)
_fields = Decoder(dict[str, Raw])


def check_request(body: bytes, *, endpoint: str, project_id: str, catalog: Catalog) -> Model | Failure:
    """Return the model that a request names, or the failure if the request must not be sent."""
    try:
        request: _ModelRequest = (_chat_request if endpoint == CHAT else _model_request).decode(body)
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _invalid(str(error))
    return find_model(request.model, project_id=project_id, catalog=catalog)


def find_model(name: str, *, project_id: str, catalog: Catalog) -> Model | Failure:
    """Return the model with this name, or the failure if there is none that the project may use."""
    if len(name) > MAX_MODEL_CHARACTERS:
        return _invalid(f"`model` has more than {MAX_MODEL_CHARACTERS} characters")
    return catalog.find(name, project_id) or model_not_found(name)


def named_model(body: bytes) -> str | None:
    """Return the model that a request names, or None if it names none."""
    try:
        return _model_request.decode(body).model
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return None


def model_not_found(model_id: str) -> Failure:
    """Return the failure of a request that names a model that is unknown, or not enabled for its project."""
    text = f"The model {model_id[:200]} does not exist, or is not enabled for this project"
    return Failure("not_found_error", "http_404", text, "model")


def with_upstream_name(body: bytes, model: Model) -> bytes:
    """Return the body with the model's name at its upstream; every other value keeps its bytes."""
    if model.name == model.id:
        return body
    return with_fields(body, model=model.name)


def with_fields(body: bytes, **changed: Any) -> bytes:
    """Return a JSON object with some fields set; every other value keeps its bytes."""
    fields: dict[str, Any] = dict(_fields.decode(body))
    return encode(fields | changed)


def _invalid(problem: str) -> Failure:
    """Return the failure for an error of the decoder.

    The decoder's text names types and places (``$.messages[0].role``), and quotes at most an invalid role.
    """
    _, _, place = problem.partition("$.")
    field = place.partition(".")[0].partition("[")[0].strip("`")
    param = field or next((name for name in ("model", "messages") if f"`{name}`" in problem), None)
    return Failure("invalid_request_error", "http_400", f"request body is invalid: {problem}", param)
