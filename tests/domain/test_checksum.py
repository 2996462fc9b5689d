"""A checksum is the same in one piece and in many, fits into both databases, and notices every small change."""

from hypothesis import given
from hypothesis import strategies as st

from batchline.domain.checksum import Checksum, checksum_of


@given(st.lists(st.binary(max_size=300)))
def test_a_checksum_of_pieces_is_that_of_the_whole(pieces: list[bytes]) -> None:
    read = Checksum()
    for piece in pieces:
        read.update(piece)
    assert (read.value, read.bytes) == (checksum_of(b"".join(pieces)), sum(map(len, pieces)))


@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_flipped_bit_is_noticed(data: bytes, draw: st.DataObject) -> None:
    bit = draw.draw(st.integers(0, len(data) * 8 - 1))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    assert checksum_of(bytes(changed)) != checksum_of(data)
    assert 0 <= checksum_of(data) < 1 << 63


def test_a_checksum_is_the_same_in_every_version() -> None:
    """What is stored today must still be readable by a later version."""
    assert checksum_of(b"batchline") == 4166055572122489324
