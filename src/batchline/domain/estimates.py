"""Estimates tokens by size: those of a request, and those of an answer whose upstream reports no usage.

What a request may cost is estimated before it runs, so that the amount can be held against the balance (D4).
"""

from msgspec import DecodeError, Raw, Struct
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

    max_tokens: Raw = Raw(b"0")
    max_completion_tokens: Raw = Raw(b"0")
    max_output_tokens: Raw = Raw(b"0")
    max_new_tokens: Raw = Raw(b"0")
    n_predict: Raw = Raw(b"0")
    n: Raw = Raw(b"1")
    n_cmpl: Raw = Raw(b"1")
    best_of: Raw = Raw(b"1")


_limits = Decoder(_Limits)
# Some upstreams read a number that is written as a text.
_number = Decoder(int, strict=False)
_LIMIT_MARKS = (b'"max_', b'"n', b'"best_of"')
"""Every name of a limit begins like one of these, so most bodies without one need not be decoded."""


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
    if not any(mark in body for mark in _LIMIT_MARKS):
        return _Output(None, _USUAL_OUTPUT_TOKENS)
    try:
        limits = _limits.decode(body)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return _Output(None, _USUAL_OUTPUT_TOKENS)
    answers = max(1, *map(_number_in, (limits.n, limits.n_cmpl, limits.best_of)))
    names = (limits.max_tokens, limits.max_completion_tokens, limits.max_output_tokens)
    given = max(map(_number_in, (*names, limits.max_new_tokens, limits.n_predict)))
    likely = min((given if given > 0 else _USUAL_OUTPUT_TOKENS) * answers, _MAX_OUTPUT_TOKENS)
    return _Output(likely if given > 0 else None, likely)


def _number_in(value: Raw) -> int:
    try:
        return _number.decode(value)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return 0


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
