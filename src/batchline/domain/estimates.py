"""Estimates tokens by size: those of a request, and those of an answer whose upstream reports no usage.

What a request may cost is estimated before it runs, so that the amount can be held against the balance (D4).
"""

import re

from msgspec import DecodeError, Raw, Struct, ValidationError
from msgspec.json import Decoder

from batchline.domain.models import Model
from batchline.domain.money import Tariff
from batchline.domain.usage import Usage

_BYTES_PER_TOKEN = 4
"""The usual length of a token in English text. In JSON, other languages and encoded files tokens are shorter or longer,
and an estimate need not be exact."""

_LINK_TOKENS = 800
"""Tokens of a linked image, whose size the request does not show: an image of 1024 pixels takes 765 to 1,445. A chat
names each image twice."""
_LINK_MARK = b'image_url"'

_USUAL_OUTPUT_TOKENS = 1024
"""Tokens of each answer whose request sets no limit: most answers of a chat are shorter."""
_MAX_OUTPUT_TOKENS = 2**31
"""Bound on a limit, so that what it may cost stays a number that a database can hold."""


class Estimate(Struct, frozen=True):
    """The amounts that a request may cost, in nano-units."""

    least: int
    """The cost of the input, and of the output up to the limit that the request sets."""
    likely: int
    """The same, and the cost of a usual output if the request sets no limit."""


FREE = Estimate(0, 0)


def estimated_cost(body: bytes, model: Model, tariff: Tariff, *, synchronous: bool) -> Estimate:
    """Return what a request may cost at most, as far as its body shows."""
    if not tariff.metered or model.price.is_zero:
        return FREE
    input_tokens = request_tokens(body)
    if model.max_tokens is not None:
        input_tokens = min(input_tokens, model.max_tokens)
    output = _output_of(body)
    usage = Usage(input_tokens=input_tokens, output_tokens=output.limit or 0)
    least = tariff.cost(model.price, usage, synchronous=synchronous)
    if output.limit is not None:
        return Estimate(least, least)
    usage = Usage(input_tokens=input_tokens, output_tokens=output.likely)
    return Estimate(least, tariff.cost(model.price, usage, synchronous=synchronous))


class _Limits(Struct):
    """The fields of a request that bound its output, under all names that upstreams know."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    max_new_tokens: int | None = None
    n_predict: int | None = None
    n: int | None = None
    n_cmpl: int | None = None
    best_of: int | None = None


# Some upstreams read a number that is written as a text.
_limits, _number = Decoder(_Limits, strict=False), Decoder(int, strict=False)
_fields = Decoder(dict[str, Raw])
_ANY_LIMIT = re.compile(rb'"(?:max_|n"|n_|best_of")')
"""The beginnings of these names. Most bodies without a limit need not be decoded."""


class _Output(Struct, frozen=True):
    """The output tokens that a request asks for, over all answers that it wants."""

    limit: int | None
    """The most tokens; None if the request sets no limit."""
    likely: int
    """The same, or the tokens of usual answers if the request sets no limit."""


def output_limit(body: bytes) -> int | None:
    """Return the most output tokens that a request asks for, over all answers that it wants; None if it sets no limit.

    Of several names for the limit the highest counts, since one of them may be unknown to the upstream.
    """
    return _output_of(body).limit


def _output_of(body: bytes) -> _Output:
    if _ANY_LIMIT.search(body) is None:
        return _Output(None, _USUAL_OUTPUT_TOKENS)
    try:
        limits = _limits_in(body)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return _Output(None, _USUAL_OUTPUT_TOKENS)
    answers = max(1, limits.n or 1, limits.n_cmpl or 1, limits.best_of or 1)
    given = max(limits.max_tokens or 0, limits.max_completion_tokens or 0, limits.max_output_tokens or 0)
    given = max(given, limits.max_new_tokens or 0, limits.n_predict or 0)
    likely = min((given if given > 0 else _USUAL_OUTPUT_TOKENS) * answers, _MAX_OUTPUT_TOKENS)
    return _Output(likely if given > 0 else None, likely)


def _limits_in(body: bytes) -> _Limits:
    """Return the limits of a request. A value that is no number counts as none."""
    try:
        return _limits.decode(body)
    except ValidationError:
        fields = _fields.decode(body)
        return _Limits(**{name: _number_in(fields[name]) for name in _Limits.__struct_fields__ if name in fields})


def _number_in(value: Raw) -> int | None:
    try:
        return _number.decode(value)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return None


def estimated_usage(*, request: bytes, answer_bytes: int) -> Usage:
    """Return the usage that an answer is charged for if its upstream reports none (E2)."""
    return Usage(input_tokens=request_tokens(request), output_tokens=text_tokens(answer_bytes))


def oversized_usage(*, request: bytes, answer_bytes: int) -> Usage:
    """Return the usage that an answer over the size limit is charged for: at most what is held for the request (E2)."""
    output_tokens = min(text_tokens(answer_bytes), _output_of(request).likely)
    return Usage(input_tokens=request_tokens(request), output_tokens=output_tokens)


def request_tokens(body: bytes) -> int:
    """Estimate the input tokens of a request from all of its body: texts, tools, files and images."""
    return text_tokens(len(body)) + _LINK_TOKENS * body.count(_LINK_MARK)


def text_tokens(size: int) -> int:
    """Estimate the tokens of so many bytes of text."""
    return -(-size // _BYTES_PER_TOKEN)
