"""Reads the lines of segments and result files: which line of the batch each is about, and what its answer used."""

import re

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

from batchline.domain.errors import Damaged
from batchline.domain.surrogates import Hidden
from batchline.domain.usage import NOTHING, Usage, reported_usage

_INDEX = re.compile(rb'\{"id":"batch_req_([0-9A-Za-z]+)_([0-9]+)",')

_CUSTOM_ID = re.compile(rb'\{"id":"batch_req_[0-9A-Za-z]+_[0-9]+","custom_id":("(?:[^"\\]+|\\.)*"|null),')


class ResultLine(Struct, frozen=True):
    """One line of an output or error file. A line that failed has no usage."""

    batch: str
    """The id of its batch, without the prefix."""
    index: int
    custom_id: str | None
    """None if the line was damaged in storage, and its id with it."""
    usage: Usage | None
    answer_bytes: int = 0
    """The size of the answer, from which its tokens are estimated if it reports none."""
    reused: bool = False
    """Whether its answer was copied from another line. Then it used nothing."""


class _Response(Struct):
    body: Raw


class _Line(Struct):
    custom_id: str | None
    response: _Response | None
    reused: bool = False


_line = Decoder(_Line)


def split_lines(data: bytes) -> list[bytes]:
    """Return lines with their ends. Raise Damaged if the last one has none."""
    *lines, rest = data.split(b"\n")
    if rest:
        raise Damaged("a line without an end")
    return [line + b"\n" for line in lines]


def index_of(line: bytes) -> int:
    """Return which line of its batch a result line is about. Raise Damaged if this service did not write it."""
    found = _INDEX.match(line)
    if found is None:
        raise Damaged("a line without an id")
    return int(found[2])


def custom_id_of(line: bytes) -> bytes | None:
    """Return the custom_id of a line as JSON text, or None if damage in storage has destroyed it. Raise Damaged."""
    found = _CUSTOM_ID.match(line)
    if found is None:
        raise Damaged("a line without a custom_id")
    return None if found[1] == b"null" else found[1]


def after_custom_id(line: bytes) -> int:
    """Return where the answer of a line begins. Raise Damaged if this service did not write it."""
    found = _CUSTOM_ID.match(line)
    if found is None:
        raise Damaged("a line without a custom_id")
    return found.end()


def read_result_line(line: bytes) -> ResultLine:
    """Return what a line says. Raise Damaged if this service did not write it."""
    found = _INDEX.match(line)
    if found is None:
        raise Damaged("a line without an id")
    read = _decode(line)
    batch, index = found[1].decode(), int(found[2])
    if read.response is None:
        return ResultLine(batch, index, read.custom_id, None)
    body = read.response.body
    if read.reused:
        return ResultLine(batch, index, read.custom_id, NOTHING, len(body), reused=True)
    return ResultLine(batch, index, read.custom_id, reported_usage(body), len(body))


def _decode(line: bytes) -> _Line:
    try:
        return _line.decode(line)
    except (DecodeError, UnicodeDecodeError) as error:
        # An answer may contain lone surrogates, which the parser refuses; it was recorded as it came.
        hidden = Hidden.hide(line)
        if hidden is None:
            raise Damaged("a line that is not JSON") from error
    try:
        return _line.decode(hidden.text)
    except (DecodeError, UnicodeDecodeError) as error:
        raise Damaged("a line that is not JSON") from error
