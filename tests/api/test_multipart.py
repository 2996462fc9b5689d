"""Forms read as they come: B1, B2."""

import logging
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchline.api.multipart import Form
from batchline.domain.errors import InvalidMultipart
from tests.support.api_server import BOUNDARY, FORM, field, file_part, form

NEARLY_BOUNDARIES = st.sampled_from(
    [b"\r\n", b"\r", b"\n", b"--", f"\r\n--{BOUNDARY[:-1]}".encode(), f"--{BOUNDARY}".encode(), b"\r\n--", b"x"]
)
CONTENT = st.lists(st.one_of(NEARLY_BOUNDARIES, st.binary(max_size=8))).map(b"".join)


def read(body: bytes, cuts: list[int]) -> tuple[Form, bytes]:
    reader = Form(FORM["content-type"])
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    pieces = [reader.feed(body[start:end]) for start, end in pairwise(edges)]
    reader.end()
    return reader, b"".join(piece for some in pieces for piece in some)


@given(CONTENT, st.lists(st.integers(0, 10_000), max_size=6))
def test_a_file_comes_through_however_the_body_is_cut(content: bytes, cuts: list[int]) -> None:
    """B1"""
    delimiter = f"\r\n--{BOUNDARY}".encode()
    content = content.replace(delimiter, b"")
    if delimiter in b"\r\n" + content or (b"\r\n" + content).endswith(b"\r"):
        content = b"x" + content.replace(b"--", b"") + b"x"
    reader, received = read(form(file_part(content), field("purpose", "batch")), cuts)
    assert received == content
    assert reader.fields == {"purpose": "batch"}
    assert reader.filename == "in.jsonl"


def test_every_single_cut() -> None:
    """B1"""
    body = form(file_part(b"a\r\n--b"), field("purpose", "batch"))
    for cut in range(len(body)):
        assert read(body, [cut])[1] == b"a\r\n--b"


def test_a_body_that_cannot_be_parsed_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """B1"""
    with caplog.at_level(logging.DEBUG), pytest.raises(InvalidMultipart):
        read(form(file_part(b"secret")).replace(b"isposition", b"is/position"), [])
    assert not caplog.records
