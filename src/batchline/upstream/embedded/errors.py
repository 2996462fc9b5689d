"""Turns requests that the embedded model's engine cannot serve into errors that are not retried.

The engine answers some of these requests with 5xx, which would be retried, and crashes on others. The texts of its
errors were found by trying such requests; the tests try them again.
"""

import re
from collections.abc import Collection
from typing import Annotated

from msgspec import DecodeError, Meta, Raw, Struct
from msgspec.json import Decoder, encode

from batchline.domain.replies import Answer
from batchline.upstream.embedded.child import CONTEXT_TOKENS

_MAX_ALTERNATIVES = 20
"""The most alternatives for each token of an answer, as in OpenAI's API.

Asked for all the tokens of its vocabulary, the engine runs out of memory.
"""

_MAX_QUOTED_CHARACTERS = 100

# Matched at the start only, because the rest of a message may quote the request.
_PERMANENT_ERROR = re.compile(
    r"(image|audio|video) input is not supported"
    r"|Failed to parse (messages|tools): "
    r"|Cannot use both json_schema and grammar"
    r"|Unknown reasoning format: "
)
_HINT = " - hint: "
"""Begins advice on the engine's flags, which is meant for its operator and not for the client."""

_Alternatives = Annotated[int, Meta(le=_MAX_ALTERNATIVES)]
_Messages = Annotated[list[Raw], Meta(max_length=CONTEXT_TOKENS)]
"""More messages than tokens never fit the context, and the engine's time to render them grows quadratically."""


class _Bounds(Struct):
    model: str | None = None
    messages: _Messages | None = None
    input: _Messages | str | None = None
    logprobs: bool | _Alternatives | None = None
    top_logprobs: _Alternatives | None = None
    n_probs: _Alternatives | None = None


class _Error(Struct):
    message: str


class _ErrorBody(Struct):
    error: _Error


_bounds = Decoder(_Bounds)
_error_body = Decoder(_ErrorBody)


def reject(body: bytes, *, names: Collection[str]) -> Answer | None:
    """Return an error for a request that the engine must not get; else None.

    Some requests would harm the engine. A request for another model than ``names`` would be answered by a model that
    its sender did not ask for.
    """
    try:
        model = _bounds.decode(body).model
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _error_answer(400, f"The embedded model does not accept this request: {error}")
    return None if model is None or model in names else _unknown_model(model, names)


def _unknown_model(model: str, names: Collection[str]) -> Answer:
    message = (
        f"There is no model {model[:_MAX_QUOTED_CHARACTERS]!r}. Only the embedded model answers here, a toy for "
        f"trying; it answers to {' and '.join(map(repr, names))}. To use another model, the operator sets "
        "BATCHLINE_UPSTREAM_URL to a model server, or maps the name to the embedded model."
    )
    return _error_answer(404, message, code="model_not_found", param="model")


def correct_status(path: str, answer: Answer) -> Answer:
    """Return the engine's answer, as a 4xx if it is an error that no retry can change."""
    if answer.status in {404, 501}:
        return _error_answer(404, f"The embedded model does not serve {path}")
    message = _message(answer) if answer.status >= 500 else ""
    return _error_answer(400, message.partition(_HINT)[0]) if _PERMANENT_ERROR.match(message) else answer


def _message(answer: Answer) -> str:
    try:
        return _error_body.decode(answer.body).error.message
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _error_answer(status: int, message: str, *, code: str | None = None, param: str | None = None) -> Answer:
    error = {"message": message, "type": "invalid_request_error", "code": code, "param": param}
    return Answer(status=status, body=encode({"error": error}))
