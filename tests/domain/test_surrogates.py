"""Surrogates without a partner: the parser never sees them, and they come back as the escapes they were."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchline.domain.surrogates import Hidden, without_surrogates


@pytest.mark.parametrize(
    "text",
    [
        rb'"\ud83d\ude00"',
        rb'"\uD83D\uDE00"',
        rb'"\\ud800"',
        rb'"\\\\ud800"',
        rb'"\ue000 \u0041"',
        '"😀 \ud7ff \ue000"'.encode(),
        b"\xff\xfe not JSON",
        b"",
    ],
)
def test_a_text_without_lone_surrogates_is_left_alone(text: bytes) -> None:
    assert Hidden.hide(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (rb'"\ud800"', rb'"\ud800"'),
        (rb'"\uDFFF"', rb'"\uDFFF"'),
        (rb'"\\\ud800"', rb'"\\\ud800"'),
        (rb'"\ud800\ud83d\ude00"', rb'"\ud800\ud83d\ude00"'),
        (rb'"\ude00\ud83d"', rb'"\ude00\ud83d"'),
        (rb'"\ud83d\n\ude00"', rb'"\ud83d\n\ude00"'),
        (b'"\xed\xa0\x80"', rb'"\ud800"'),
        (b'"\xed\xbf\xbf"', rb'"\udfff"'),
        (b'"\xed\xa0\xbd\xed\xb8\x80"', rb'"\ud83d\ude00"'),
    ],
)
def test_a_lone_surrogate_is_hidden_and_restored(text: bytes, expected: bytes) -> None:
    hidden = Hidden.hide(text)
    assert hidden is not None
    assert hidden.text.isascii()
    json.loads(hidden.text).encode()
    assert hidden.restore(hidden.text) == expected


def test_bytes_behind_a_backslash_stay_invalid() -> None:
    """An escape in their place would turn an invalid escape into a backslash and five letters."""
    assert Hidden.hide(b'"\\\xed\xa0\x80"') is None


def test_people_read_a_replacement_character() -> None:
    hidden = Hidden.hide(rb"a\ud800b\uDC00")
    assert hidden is not None
    assert hidden.restore_readable(hidden.text.decode()) == "a\ufffdb\ufffd"


@given(st.text(st.characters(max_codepoint=0x10FFFF)).map(json.dumps) | st.text(st.sampled_from('\\ud89cDe0"')))
def test_an_escape_is_restored_byte_for_byte(text: str) -> None:
    hidden = Hidden.hide(text.encode())
    assert hidden is None or hidden.restore(hidden.text) == text.encode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (rb'"cut \ud83d"', "cut \ufffd"),
        (b'"cut \xed\xa0\xbd"', "cut \ufffd"),
        (rb'"\ud83d\ude00 \\ud83d \""', '😀 \\ud83d "'),
    ],
)
def test_a_text_for_people_has_replacement_characters(text: bytes, expected: str) -> None:
    assert json.loads(without_surrogates(text)) == expected
