"""Encodes and decodes the lines of a work file: a batch's own copy of its input, written once and read by shard.

Each record is a header of three little-endian 32-bit numbers (the line's index in its batch, the length of its
custom_id, the length of its body), then ``custom_id`` as JSON text, then the body as it is sent.
"""

from collections.abc import Iterator
from struct import Struct as Layout

from msgspec import Struct

_HEADER = Layout("<III")


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
