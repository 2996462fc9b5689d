"""The records of a work file."""

from hypothesis import given
from hypothesis import strategies as st

from batchline.domain.lines import Line, decode_lines, encode_line

LINES = st.lists(st.builds(Line, st.integers(0, 2**32 - 1), st.binary(max_size=20), st.binary(max_size=50)))


@given(LINES)
def test_lines_are_read_as_they_were_written(lines: list[Line]) -> None:
    shard = b"".join(encode_line(line.index, line.custom_id, line.body) for line in lines)
    assert list(decode_lines(shard)) == lines


def test_the_layout_of_a_record_is_fixed() -> None:
    """Work files of batches that run outlive an upgrade of the service."""
    record = encode_line(258, b'"a"', b"{}")
    assert record == b"\x02\x01\x00\x00" + b"\x03\x00\x00\x00" + b"\x02\x00\x00\x00" + b'"a"{}'
