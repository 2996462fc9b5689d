"""Reads lines of saved result files, also those that are unusual: an answer is whatever the model's server sent."""

from typing import TypeVar

from msgspec import DecodeError, Struct
from msgspec.json import Decoder

from batchline.domain.surrogates import without_surrogates

T = TypeVar("T")


class FailureReason(Struct, frozen=True):
    """Why a line failed."""

    code: str | None = None
    message: str = ""


class _Body(Struct):
    error: FailureReason | None = None


class _Response(Struct):
    body: _Body


class _FailedLine(Struct):
    error: FailureReason | None = None
    response: _Response | None = None


_failed_line = Decoder(_FailedLine)


def decode_line(decoder: Decoder[T], line: bytes) -> T:
    """Decode a line. A surrogate without a partner, which an answer may have (D1), becomes a replacement character.

    Raise DecodeError.
    """
    try:
        return decoder.decode(line)
    except DecodeError:
        return decoder.decode(without_surrogates(line))


def error_of(line: bytes) -> FailureReason:
    """Return why a line of an error file failed, as far as it can be read.

    Other servers than batchline write the upstream's refusal as a response, and no error of the line.
    """
    try:
        found = decode_line(_failed_line, line)
    except DecodeError:
        return FailureReason()
    return found.error or (found.response and found.response.body.error) or FailureReason()
