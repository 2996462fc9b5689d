"""What the embedded model's engine cannot do, told as what it is: a request that no retry will help.

The engine answers some of these with 5xx, which would be tried again, and some it does not survive. The texts were
found by asking it; the tests ask it again.
"""

import re
from typing import Annotated

from msgspec import DecodeError, Meta, Raw, Struct
from msgspec.json import Decoder, encode

from batchline.domain.replies import Answer
from batchline.upstream.embedded.child import CONTEXT_TOKENS

_MOST_ALTERNATIVES = 20
"""To each token of an answer, as in OpenAI's API. For every word it knows, the engine runs out of memory."""

# From the start only: what follows may quote the request.
_FOR_GOOD = re.compile(
    r"(image|audio|video) input is not supported"
    r"|Failed to parse (messages|tools): "
    r"|Cannot use both json_schema and grammar"
    r"|Unknown reasoning format: "
)
_HINT = " - hint: "
"""To whoever started the engine, not to whoever asks it."""

_Alternatives = Annotated[int, Meta(le=_MOST_ALTERNATIVES)]
_Messages = Annotated[list[Raw], Meta(max_length=CONTEXT_TOKENS)]
"""More than fit, whatever they say; rendering them takes the engine time that grows with their square."""


class _Bounds(Struct):
    messages: _Messages | None = None
    input: _Messages | str | None = None
    logprobs: bool | _Alternatives | None = None
    top_logprobs: _Alternatives | None = None
    n_probs: _Alternatives | None = None


class _Error(Struct):
    message: str


class _Told(Struct):
    error: _Error


_bounds = Decoder(_Bounds)
_told = Decoder(_Told)


def refused_unasked(body: bytes) -> Answer | None:
    """The answer to a request that would harm the engine."""
    try:
        _bounds.decode(body)
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _refusal(400, f"The embedded model does not take this request: {error}")
    return None


def as_refusal(path: str, answer: Answer) -> Answer:
    """The engine's answer; where it is one that trying again will not change, as a 4xx."""
    if answer.status in {404, 501}:
        return _refusal(404, f"The embedded model does not serve {path}")
    message = _message(answer) if answer.status >= 500 else ""
    return _refusal(400, message.partition(_HINT)[0]) if _FOR_GOOD.match(message) else answer


def _message(answer: Answer) -> str:
    try:
        return _told.decode(answer.body).error.message
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _refusal(status: int, message: str) -> Answer:
    error = {"message": message, "type": "invalid_request_error", "code": None, "param": None}
    return Answer(status=status, body=encode({"error": error}))
