"""Compressed bodies: every usual spelling is read, within bounds of memory and time."""

import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchline.upstream.encoding import Undecodable, decode, is_plain, is_readable

BODY = b'{"a":"b"}' * 100


def raw_deflate(body: bytes) -> bytes:
    compressor = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return compressor.compress(body) + compressor.flush()


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        (b"gzip", gzip.compress(BODY)),
        (b" GZip ", gzip.compress(BODY)),
        (b"x-gzip", gzip.compress(BODY)),
        (b"gzip", gzip.compress(BODY[:50]) + gzip.compress(BODY[50:])),
        (b"deflate", zlib.compress(BODY)),
        (b"deflate", raw_deflate(BODY)),
    ],
    ids=["gzip", "case", "x-gzip", "two members", "deflate", "raw deflate"],
)
def test_what_servers_send_is_decoded(encoding: bytes, body: bytes) -> None:
    assert is_readable(encoding)
    assert decode(bytearray(body), encoding, max_bytes=len(BODY)) == BODY


@pytest.mark.parametrize("encoding", [b"br", b"zstd", b"compress", b"gzip, br", b"gzip,gzip", b"\xff"])
def test_other_encodings_are_not_read(encoding: bytes) -> None:
    assert not is_readable(encoding)
    assert not is_plain(encoding)
    with pytest.raises(Undecodable):
        decode(b"x", encoding, max_bytes=100)


@pytest.mark.parametrize("encoding", [b"", b" identity", b"Identity"])
def test_identity_is_plain(encoding: bytes) -> None:
    assert is_plain(encoding)


@pytest.mark.parametrize(
    "body",
    [gzip.compress(BODY), gzip.compress(BODY) * 2, gzip.compress(BODY[:-1]) + gzip.compress(b"xx")],
    ids=["one", "twice", "in the second member"],
)
def test_one_byte_over_the_limit_is_refused(body: bytes) -> None:
    with pytest.raises(Undecodable, match="answer over 899 bytes"):
        decode(body, b"gzip", max_bytes=len(BODY) - 1)


def test_a_bomb_is_never_in_memory() -> None:
    bomb = gzip.compress(bytes(100_000_000))
    tracemalloc.start()
    try:
        with pytest.raises(Undecodable):
            decode(bomb, b"gzip", max_bytes=1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_thousands_of_empty_members_are_refused() -> None:
    """Each member copies what is left, so that a megabyte of them would take minutes."""
    with pytest.raises(Undecodable, match="over 16 parts"):
        decode(gzip.compress(b"") * 50_000, b"gzip", max_bytes=100)


@given(st.binary(max_size=200), st.sampled_from([b"gzip", b"deflate"]))
def test_any_bytes_are_decoded_or_refused(body: bytes, encoding: bytes) -> None:
    try:
        assert len(decode(body, encoding, max_bytes=1000)) <= 1000
    except Undecodable:
        """That is the only error."""


@given(st.binary(), st.data())
def test_a_body_that_is_cut_is_refused(body: bytes, data: st.DataObject) -> None:
    """D2: half an answer is never taken for a whole one."""
    compressed = gzip.compress(body)
    cut = data.draw(st.integers(1, len(compressed) - 1))
    with pytest.raises(Undecodable):
        decode(compressed[:cut], b"gzip", max_bytes=10_000)
