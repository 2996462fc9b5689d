"""Encodes and decodes the lines of a work file: a batch's own copy of its input, written once and read by shard.

Each record is a header of three little-endian 32-bit numbers (the line's index in its batch, the length of its
custom_id, the length of its body), then ``custom_id`` as JSON text, then the body as it is sent.
"""

import struct
from collections.abc import Iterator

from msgspec import Struct

from batchline.domain.checksum import checksum_of
from batchline.domain.errors import Damaged
from batchline.domain.records import Shard

_HEADER = struct.Struct("<III")


class Line(Struct, frozen=True):
    """One line of a work file."""

    index: int
    custom_id: bytes
    """JSON text, safe to be written into a line of a result file."""
    body: bytes


def encode_line(index: int, custom_id: bytes, body: bytes) -> bytes:
    """Return the record of one line."""
    return _HEADER.pack(index, len(custom_id), len(body)) + custom_id + body


def decode_lines(shard: bytes) -> Iterator[Line]:
    """Yield the lines of a shard, in order."""
    at = 0
    while at < len(shard):
        index, id_length, body_length = _HEADER.unpack_from(shard, at)
        body_at = at + _HEADER.size + id_length
        at_next = body_at + body_length
        yield Line(index, shard[at + _HEADER.size : body_at], shard[body_at:at_next])
        at = at_next


def lines_of(shard: Shard, data: bytes) -> list[Line]:
    """Return the lines of a shard from its part of the work file. Raise Damaged unless they are what was written."""
    intact = len(data) == shard.length and shard.checksum in (None, checksum_of(data))
    if not intact:
        raise Damaged(f"shard {shard.n} at {shard.offset}")
    try:
        lines = list(decode_lines(data))
    except struct.error as error:
        raise Damaged(f"shard {shard.n} at {shard.offset}") from error
    if len(lines) != shard.lines or (shard.checksum is None and sum(map(_size, lines)) != shard.length):
        raise Damaged(f"shard {shard.n} at {shard.offset}")
    return lines


def _size(line: Line) -> int:
    return _HEADER.size + len(line.custom_id) + len(line.body)
