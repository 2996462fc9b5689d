"""Which lines of an input file count (C4)."""

from io import BytesIO

import pytest

from batchline.domain.input_lines import InputLines, is_blank, skip_byte_order_mark
from tests.support.input_files import BOM


@pytest.mark.parametrize(
    ("data", "counted"),
    [
        (b"", []),
        (BOM, []),
        (BOM + b"\n", []),
        (BOM + b" \t\r\n\r\na\n\n b\r\n", [b"a", b"b"]),
        (BOM + b"a\n" + BOM + b"\nb", [b"a", BOM, b"b"]),
        (b"\n" + BOM + b"\na", [BOM, b"a"]),
        (BOM + BOM + b"\na", [BOM, b"a"]),
        (b"\x0b\n\x0c\n\xc2\xa0\n", [b"\x0b", b"\x0c", b"\xc2\xa0"]),
    ],
)
def test_blank_lines_and_a_leading_byte_order_mark_do_not_count(data: bytes, counted: list[bytes]) -> None:
    lines = InputLines()
    texts = [lines.take(line) for line in data.split(b"\n")]
    assert [text for text in texts if text is not None] == counted
    assert lines.count == len(counted)


@pytest.mark.parametrize("taken", range(4))
def test_skipped_lines_count_as_taken_ones_do(taken: int) -> None:
    lines, rest = InputLines(), (BOM + b"\n \na\n\n" + BOM + b"\nb").split(b"\n")
    for line in rest[:taken]:
        lines.take(line)
    lines.skip(rest[taken:])
    assert lines.count == 3


@pytest.mark.parametrize(("data", "rest"), [(BOM + b"\na", b"\na"), (b"\na", b"\na"), (b"\xef\xbb", b"\xef\xbb")])
def test_a_byte_order_mark_is_skipped(data: bytes, rest: bytes) -> None:
    file = BytesIO(data)
    skip_byte_order_mark(file)
    assert file.read() == rest


def test_only_the_white_space_of_json_is_blank() -> None:
    assert is_blank(b" \t\r\n")
    assert not is_blank(b"\x0b")
