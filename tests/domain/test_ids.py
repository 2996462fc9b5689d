"""Ids: A5, B (file object), B10, C (batch object), D1, F3."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchline.domain import ids

ENTROPY = bytes(range(10))
TIMES = st.floats(0, 1e10)


def test_ids_look_as_the_contract_says() -> None:
    assert re.fullmatch(r"batch_[0-9A-HJKMNP-TV-Z]{26}", ids.batch_id(1_800_000_000.5, ENTROPY))
    assert ids.file_id(b"\x00\xff") == "file-00ff"
    assert ids.request_id(b"\x00\xff") == "req_00ff"
    assert ids.api_key(b"\x00\xff") == "bl-00ff"


def test_a_ulid_is_48_bits_of_time_and_80_of_chance() -> None:
    """Held against values worked out by hand from the format's description."""
    assert ids.ulid(0, bytes(10)) == "0" * 26
    assert ids.ulid(0, b"\xff" * 10) == "0" * 10 + "Z" * 16
    assert ids.ulid(((1 << 48) - 1) / 1000, b"\xff" * 10) == "7" + "Z" * 25
    assert ids.ulid(0.032, bytes(10)) == "0000000010" + "0" * 16
    assert ids.ulid(0, ENTROPY + b"more than it takes") == ids.ulid(0, ENTROPY)


@given(early=TIMES, late=TIMES)
def test_batch_ids_sort_by_time(early: float, late: float) -> None:
    early, late = sorted((early, late))
    if int(early * 1000) < int(late * 1000):
        assert ids.batch_id(early, b"\xff" * 10) < ids.batch_id(late, bytes(10))


@pytest.mark.rule("D1", "A line's id is the same however often it is tried.")
def test_a_lines_id_is_its_own_and_stays() -> None:
    """D1: the same however often the line is tried, and no other line's."""
    assert ids.line_id("batch_01A", 7) == ids.line_id("batch_01A", 7) == "batch_req_01A_7"
    lines = {ids.line_id(batch, index) for batch in ("batch_1", "batch_11") for index in (0, 1, 11, 111)}
    assert len(lines) == 8


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("file-abc", "file-abc"),
        ("file_abc", "file-abc"),
        ("file_0_a", "file-0_a"),
        ("file_", "file_"),
        ("file__a", "file__a"),
        ("profile_abc", "profile_abc"),
        ("batch_1", "batch_1"),
        ("", ""),
        ("file_\n", "file_\n"),
    ],
)
def test_the_legacy_prefix_names_the_same_file(written: str, meant: str) -> None:
    """B10."""
    assert ids.canonical_file_id(written) == meant


def test_a_keys_digest_is_one_way_and_takes_anything() -> None:
    """F3, A2: every byte sequence that a header may contain has a hash."""
    assert len(ids.key_digest("bl-1")) == 32
    assert ids.key_digest("bl-1") != ids.key_digest("bl-2")
    assert b"bl-1" not in ids.key_digest("bl-1")
    assert ids.key_digest("\udcff") != ids.key_digest("\udcfe")
