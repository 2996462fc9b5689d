"""Tokens: what an answer says it took, and their sum over a batch."""

from collections.abc import Collection

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

_MOST_TOKENS = 2**31
"""Of one answer. More is no count, and would not fit beside others in the database."""


class Usage(Struct, frozen=True, kw_only=True):
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


NOTHING = Usage()


def total(usages: Collection[Usage]) -> Usage:
    return Usage(
        input_tokens=sum(usage.input_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        output_tokens=sum(usage.output_tokens for usage in usages),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )


class _InputDetails(Struct):
    cached_tokens: int | None = None


class _OutputDetails(Struct):
    reasoning_tokens: int | None = None


class _Reported(Struct):
    """In the words of chat completions, or in those of responses."""

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
    """What an answer reports; nothing where it reports nothing, or nonsense."""
    try:
        return usage_in(_answer.decode(body).usage)
    except DecodeError:
        return NOTHING


def usage_in(report: Raw) -> Usage:
    """Of the field ``usage`` of an answer."""
    try:
        reported = _reported.decode(report)
    except DecodeError:
        return NOTHING
    before = reported.prompt_tokens_details or reported.input_tokens_details
    after = reported.completion_tokens_details or reported.output_tokens_details
    return Usage(
        input_tokens=_count(reported.prompt_tokens or reported.input_tokens),
        cached_tokens=_count(before.cached_tokens if before else None),
        output_tokens=_count(reported.completion_tokens or reported.output_tokens),
        reasoning_tokens=_count(after.reasoning_tokens if after else None),
    )


def _count(tokens: int | None) -> int:
    return tokens if tokens is not None and 0 <= tokens < _MOST_TOKENS else 0
