"""Estimates tokens by size: those of a request, and those of an answer whose upstream reports no usage.

What a request may cost is estimated before it runs, so that the amount can be held against the balance (D4).
"""

from msgspec import DecodeError, Struct
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
"""Tokens of an answer whose request sets no limit: most answers of a chat are shorter."""
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
    limit = output_limit(body)
    usage = Usage(input_tokens=input_tokens, output_tokens=limit or 0)
    least = tariff.cost(model.price, usage, synchronous=synchronous)
    if limit is not None:
        return Estimate(least, least)
    usage = Usage(input_tokens=input_tokens, output_tokens=_USUAL_OUTPUT_TOKENS)
    return Estimate(least, tariff.cost(model.price, usage, synchronous=synchronous))


class _Limits(Struct):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None


_limits = Decoder(_Limits)
_LIMIT_MARK = b'"max_'
"""Every name of a limit begins like this, so most bodies without one need not be decoded."""


def output_limit(body: bytes) -> int | None:
    """Return the most output tokens that a request asks for, over all answers that it wants; None if it sets no limit.

    Of several names for the limit the highest counts, since one of them may be unknown to the upstream.
    """
    if _LIMIT_MARK not in body:
        return None
    try:
        limits = _limits.decode(body)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return None
    given = max(limits.max_tokens or 0, limits.max_completion_tokens or 0, limits.max_output_tokens or 0)
    answers = max(limits.n or 1, limits.best_of or 1, 1)
    return min(given * answers, _MAX_OUTPUT_TOKENS) if given > 0 else None


def estimated_usage(*, request: bytes, answer_bytes: int) -> Usage:
    """Return the usage that an answer is charged for if its upstream reports none (E2)."""
    return Usage(input_tokens=request_tokens(request), output_tokens=text_tokens(answer_bytes))


def request_tokens(body: bytes) -> int:
    """Estimate the input tokens of a request from all of its body: texts, tools, files and images."""
    return text_tokens(len(body)) + _LINK_TOKENS * body.count(_LINK_MARK)


def text_tokens(size: int) -> int:
    """Estimate the tokens of so many bytes of text."""
    return -(-size // _BYTES_PER_TOKEN)
