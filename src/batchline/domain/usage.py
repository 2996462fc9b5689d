"""Reads the token usage that an answer reports, and sums usages."""

from collections.abc import Collection

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

_MAX_TOKENS = 2**31
"""Bound on a count in one answer. A larger number is not a count, and sums of such would not fit into the database."""


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens of one answer, or of many."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


NOTHING = Usage()


def total(usages: Collection[Usage]) -> Usage:
    """Return the sum of usages."""
    return Usage(
        input_tokens=sum([usage.input_tokens for usage in usages]),
        cached_tokens=sum([usage.cached_tokens for usage in usages]),
        output_tokens=sum([usage.output_tokens for usage in usages]),
        reasoning_tokens=sum([usage.reasoning_tokens for usage in usages]),
    )


class _InputDetails(Struct):
    cached_tokens: int | None = None


class _OutputDetails(Struct):
    reasoning_tokens: int | None = None


class _Reported(Struct):
    """Usage with the field names of chat completions, or with those of responses."""

    total_tokens: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _InputDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _InputDetails | None = None
    output_tokens_details: _OutputDetails | None = None


class _Answer(Struct):
    usage: Raw = Raw(b"null")


_answer = Decoder(_Answer)
_reported = Decoder(_Reported)


def reported_usage(body: bytes) -> Usage:
    """Return the usage that an answer reports; NOTHING if it reports none or an invalid one."""
    try:
        return usage_in(_answer.decode(body).usage)
    except DecodeError:
        return NOTHING


def usage_in(report: Raw) -> Usage:
    """Return the usage in the field ``usage`` of an answer.

    NOTHING if one of its two counts is missing or is no count: negative, a fraction, too large or of another type.
    """
    try:
        reported = _reported.decode(report)
    except DecodeError:
        return NOTHING
    input_tokens = _larger(reported.prompt_tokens, reported.input_tokens)
    output_tokens = _larger(reported.completion_tokens, reported.output_tokens)
    if input_tokens is not None and output_tokens is None and reported.total_tokens is not None:
        # Endpoints without a text as answer, such as embeddings, report the input and the total.
        output_tokens = reported.total_tokens - input_tokens
    if input_tokens is None or output_tokens is None:
        return NOTHING
    if not (0 <= input_tokens < _MAX_TOKENS and 0 <= output_tokens < _MAX_TOKENS):
        return NOTHING
    input_details = reported.prompt_tokens_details or reported.input_tokens_details
    output_details = reported.completion_tokens_details or reported.output_tokens_details
    return Usage(
        input_tokens=input_tokens,
        cached_tokens=_detail(input_details.cached_tokens) if input_details else 0,
        output_tokens=output_tokens,
        reasoning_tokens=_detail(output_details.reasoning_tokens) if output_details else 0,
    )


def _larger(tokens: int | None, other_tokens: int | None) -> int | None:
    """Return the count under one of its two names. A server that writes both may leave one of them at 0."""
    if tokens is None or other_tokens is None:
        return other_tokens if tokens is None else tokens
    return max(tokens, other_tokens)


def _detail(tokens: int | None) -> int:
    return tokens if tokens is not None and 0 <= tokens < _MAX_TOKENS else 0
