"""Cursors, layouts and orders are read as they were written."""

import pytest

from batchline.domain import ids
from batchline.domain.checksum import checksum_of
from batchline.domain.outcomes import BATCH_CANCELLED, error_line
from batchline.domain.result_order import (
    Cursor,
    MovedLine,
    OrderBuilder,
    OrderedPart,
    PlacedLine,
    ResultOrder,
    decode_layout,
    encode_layout,
    keep_places,
    size_of,
)


@pytest.mark.parametrize("cursor", [Cursor(0, 0), Cursor(1, 0), Cursor(1 << 50, 1 << 40)])
def test_a_cursor_is_read_as_it_was_written(cursor: Cursor) -> None:
    assert Cursor.parse(str(cursor)) == cursor


@pytest.mark.parametrize(
    "text", ["", "r", "1-1", "r1", "r-1", "rg-1", "r1-1 ", "r1-1\n", "R1-1", "r" + "1" * 16 + "-1"]
)
def test_other_texts_are_no_cursors(text: str) -> None:
    assert Cursor.parse(text) is None


def test_a_layout_says_where_each_line_was() -> None:
    layout = encode_layout([7, 3, 9], [b"aa\n", b"b\n", b"cccc\n"])
    assert list(decode_layout(layout)) == [PlacedLine(7, 0, 3), PlacedLine(3, 3, 5), PlacedLine(9, 5, 10)]
    kept = keep_places(layout, {3})
    assert list(decode_layout(kept)) == [PlacedLine(3, 3, 5)]
    assert size_of(layout) == size_of(kept) == 10
    assert list(decode_layout(b"")) == []


def test_an_order_notes_where_lines_of_emptied_segments_are() -> None:
    lines = [error_line(ids.line_id("batch_X", index), b'"a"', BATCH_CANCELLED) for index in range(3)]
    layout = encode_layout([1], [lines[1]])
    builder = OrderBuilder()
    builder.add_emptied(4, layout)
    assert builder.wants_lines
    data = b"".join(lines)
    builder.add(6, output_bytes=0, error_bytes=len(data), checksum=checksum_of(data))
    builder.add_lines(data, is_error=True, offset=100)
    assert builder.next_segment == 7
    order = ResultOrder.decode(builder.finish().encode())
    assert order.parts == [OrderedPart(4, 0, 0, 0, layout), OrderedPart(6, 0, len(data), checksum_of(data))]
    assert order.moved == [MovedLine(1, True, 100 + len(lines[0]), len(lines[1]))]
