"""The order of a batch's results, which is the order in which its lines were recorded, and never changes.

Lines are recorded as segments, and the segments of a batch are numbered in the order in which readers could see them.
A *cursor* names a place in this order by a segment and a byte in it. While a batch runs, its results are read from the
segments. When it ends, its segments are joined into two files, and the order is kept beside them: which part of each
file came from which segment.

A repair may find a segment damaged. Its lines then run again and are recorded in a later segment, but keep their place:
the segment is *emptied*, and its *layout* says which lines it had and where each of them began. A reader that was past
it does not get them again, and a reader before it waits there until they are written to the files of the batch.
"""

import re
import struct
import zlib
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import NamedTuple, Self

from msgspec import Struct, msgpack

from batchline.domain.result_lines import index_of, split_lines

_CURSOR = re.compile(r"r([0-9a-f]{1,15})-([0-9a-f]{1,15})")
_NO_LINE = 0xFFFFFFFF
"""Stands in a layout for a line that has its place elsewhere."""
_COMPRESSION_LEVEL = 1


class Cursor(NamedTuple):
    """A place between two lines: the next one begins at this byte of this segment, or after it."""

    segment: int
    offset: int

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the cursor that a text stands for, or None if the text is not a cursor."""
        match = _CURSOR.fullmatch(text)
        return None if match is None else cls(int(match[1], 16), int(match[2], 16))

    def __str__(self) -> str:
        return f"r{self.segment:x}-{self.offset:x}"


START = Cursor(0, 0)


class PlacedLine(Struct, frozen=True):
    """A line of a segment, and the bytes that it had there."""

    index: int
    start: int
    end: int


def encode_layout(indexes: Sequence[int], lines: Iterable[bytes]) -> bytes:
    """Return the layout of a segment with these lines, whose indexes in their batch are given in the same order."""
    return struct.pack(f"<{2 * len(indexes)}I", *indexes, *map(len, lines))


def decode_layout(layout: bytes) -> Iterator[PlacedLine]:
    """Yield the lines of a segment that keep their place in it."""
    numbers = struct.unpack(f"<{len(layout) // 4}I", layout)
    start, half = 0, len(numbers) // 2
    for index, length in zip(numbers[:half], numbers[half:], strict=True):
        if index != _NO_LINE:
            yield PlacedLine(index, start, start + length)
        start += length


def size_of(layout: bytes) -> int:
    """Return the number of bytes that a segment with this layout had."""
    return sum(struct.unpack(f"<{len(layout) // 4}I", layout)[len(layout) // 8 :])


def keep_places(layout: bytes, indexes: Container[int]) -> bytes:
    """Return a layout in which only these lines keep their place."""
    numbers = struct.unpack(f"<{len(layout) // 4}I", layout)
    half = len(numbers) // 2
    kept = [index if index in indexes else _NO_LINE for index in numbers[:half]]
    return struct.pack(f"<{len(numbers)}I", *kept, *numbers[half:])


class OrderedPart(Struct, frozen=True, array_like=True):
    """The bytes of the result files that came from one segment, or the layout of an emptied one."""

    segment: int
    output_bytes: int
    error_bytes: int
    checksum: int
    """The checksum of its output lines and its error lines, in this order."""
    layout: bytes | None = None


class MovedLine(Struct, frozen=True, array_like=True):
    """The bytes in a result file of a line whose segment was emptied."""

    index: int
    is_error: bool
    offset: int
    length: int


class ResultOrder(Struct, array_like=True):
    """The order of the lines in the result files of a batch."""

    parts: list[OrderedPart]
    moved: list[MovedLine]

    def encode(self) -> bytes:
        """Return the order as it is stored."""
        return zlib.compress(msgpack.encode(self), _COMPRESSION_LEVEL)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Return the order that ``encode`` made these bytes of."""
        return msgpack.decode(zlib.decompress(data), type=cls)


class OrderBuilder:
    """Notes the order of the lines while the result files are written."""

    def __init__(self) -> None:
        self._parts: list[OrderedPart] = []
        self._moved: dict[int, MovedLine] = {}
        self._without_bytes: set[int] = set()
        """The lines of emptied segments."""

    @property
    def wants_lines(self) -> bool:
        """Whether ``add_lines`` is needed: the files contain lines that have their place elsewhere."""
        return bool(self._without_bytes)

    @property
    def next_segment(self) -> int:
        """A number after those of all segments so far."""
        return self._parts[-1].segment + 1 if self._parts else 0

    def add_emptied(self, segment: int, layout: bytes) -> None:
        """Append the places of lines whose bytes follow later."""
        self._without_bytes.update(line.index for line in decode_layout(layout))
        self._parts.append(OrderedPart(segment, 0, 0, 0, layout))

    def add(self, segment: int, *, output_bytes: int, error_bytes: int, checksum: int) -> None:
        """Append the lines of a segment, which follow in the files on those of the segment before."""
        self._parts.append(OrderedPart(segment, output_bytes, error_bytes, checksum))

    def add_lines(self, data: bytes, *, is_error: bool, offset: int) -> None:
        """Note lines at an offset of a result file, if they have their place elsewhere."""
        for line in split_lines(data):
            if (index := index_of(line)) in self._without_bytes:
                self._moved[index] = MovedLine(index, is_error, offset, len(line))
            offset += len(line)

    def finish(self) -> ResultOrder:
        """Return the order of all lines."""
        return ResultOrder(self._parts, list(self._moved.values()))
