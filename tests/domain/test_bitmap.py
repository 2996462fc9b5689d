"""Which lines of a shard are settled: C12 leans on every bit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchline.domain.bitmap import all_but, unsettled

SHARDS = st.integers(1, 300).flatmap(
    lambda lines: st.tuples(st.just(lines), st.sets(st.integers(0, lines - 1), max_size=lines))
)


def test_the_lowest_bit_of_the_first_byte_is_the_first_line() -> None:
    assert unsettled(b"\x01\x02", 10) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert unsettled(b"\0", 3) == [0, 1, 2]
    assert unsettled(b"\xff", 8) == []
    assert all_but([0, 9], 10) == b"\xfe\x01"


@pytest.mark.rule("C12", "The bits of a shard stand for its lines one by one.")
@given(SHARDS)
def test_all_but_some_leaves_exactly_those(shard: tuple[int, set[int]]) -> None:
    """C12: no line is lost and none is run that is not meant."""
    lines, left = shard
    settled = all_but(left, lines)
    assert unsettled(settled, lines) == sorted(left)
    assert len(settled) == (lines + 7) // 8


@given(SHARDS)
def test_no_bit_stands_beyond_the_last_line(shard: tuple[int, set[int]]) -> None:
    """A shard is done when its bitmap is all ones and nothing else: a stray bit would keep it open for ever."""
    lines, left = shard
    assert int.from_bytes(all_but(left, lines), "little") < 1 << lines
    assert int.from_bytes(all_but([], lines), "little") == (1 << lines) - 1
