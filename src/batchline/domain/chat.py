"""The rules of a request that are checked before anyone is asked (D6), and what is changed in it on its way."""

from typing import Annotated, Any, Literal

from msgspec import DecodeError, Meta, Raw, Struct
from msgspec.json import Decoder, encode

from batchline.domain.models import Catalog, Model
from batchline.domain.outcomes import Failure

CHAT = "/v1/chat/completions"

Role = Literal["user", "assistant", "system", "tool", "developer"]


class _Message(Struct):
    role: Role


class _Named(Struct):
    model: Annotated[str, Meta(min_length=1)]


class _Chat(_Named):
    messages: Annotated[list[_Message], Meta(min_length=1)]


_named = Decoder(_Named)
_chat = Decoder(_Chat)
_fields = Decoder(dict[str, Raw])


def check_request(body: bytes, *, endpoint: str, project_id: str, catalog: Catalog) -> Model | Failure:
    """The model that answers a request, or why nobody is asked."""
    try:
        request: _Named = (_chat if endpoint == CHAT else _named).decode(body)
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _invalid(str(error))
    model = catalog.find(request.model, project_id)
    return no_such_model(request.model) if model is None else model


def no_such_model(model_id: str) -> Failure:
    text = f"The model {model_id[:200]} does not exist, or is not enabled for this project"
    return Failure("not_found_error", "http_404", text, "model")


def addressed(body: bytes, model: Model) -> bytes:
    """The body with the model under its upstream's name; every other value keeps its bytes."""
    if model.name == model.id:
        return body
    return with_fields(body, model=model.name)


def with_fields(body: bytes, **changed: Any) -> bytes:
    """A JSON object with some fields set; every other value keeps its bytes."""
    fields: dict[str, Any] = dict(_fields.decode(body))
    return encode(fields | changed)


def _invalid(problem: str) -> Failure:
    """The decoder tells kinds and places (``$.messages[0].role``), and at most the role that is none."""
    _, _, place = problem.partition("$.")
    field = place.partition(".")[0].partition("[")[0].strip("`")
    named = field or next((name for name in ("model", "messages") if f"`{name}`" in problem), None)
    return Failure("invalid_request_error", "http_400", f"request body is invalid: {problem}", named)
