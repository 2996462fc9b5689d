"""The body of an output line: D1, D7."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchline.domain.outcomes import Success, output_line, read_result

CHAT, EMBED = "/v1/chat/completions", "/v1/embeddings"
FINGERPRINT = b',"system_fingerprint":null}'


def result_body(answer: bytes, *, endpoint: str) -> bytes | None:
    result = read_result(answer, endpoint=endpoint)
    return None if result is None else result[0]


def chat(answer: bytes) -> bytes | None:
    return result_body(answer, endpoint=CHAT)


@pytest.mark.rule("D1", "The body is one line of JSON.")
def test_pretty_printed_json_becomes_one_line() -> None:
    """D1: with every kind of line end; nothing inside a string changes."""
    answer = b'{\r\n  "a": [\n 1,\r2 ],\n\t"b": "x  \\n\\r y"\n}\n'
    body = chat(answer)
    assert body is not None
    assert json.loads(body) == json.loads(answer) | {"system_fingerprint": None}
    assert len(body.decode().splitlines()) == 1


@pytest.mark.rule("D1", "U+2028, U+2029 and U+0085 are escaped.")
@pytest.mark.parametrize("endpoint", [CHAT, EMBED])
@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085"])
def test_what_others_take_for_a_lines_end_is_escaped(endpoint: str, character: str) -> None:
    """D1: in values and in keys, at the top and below."""
    document = {f"k{character}": f"{character}v", "deep": [{f"{character}": character * 3}]}
    body = result_body(json.dumps(document, ensure_ascii=False).encode(), endpoint=endpoint)
    assert body is not None
    assert character.encode() not in body
    assert {**json.loads(body), "system_fingerprint": 0} == {**document, "system_fingerprint": 0}


@pytest.mark.rule("D1", "system_fingerprint is null in chat completions.")
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b'{"system_fingerprint":"fp_1","a":1}', b'{"system_fingerprint":null,"a":1}'),
        (b'{"a":1,"system_fingerprint":{"x":[]}}', b'{"a":1' + FINGERPRINT),
        (b'{"a":1}', b'{"a":1' + FINGERPRINT),
        (b"{}", b'{"system_fingerprint":null}'),
    ],
)
def test_the_system_fingerprint_is_null(answer: bytes, expected: bytes) -> None:
    """D1, D7: set where it is, added where it is not."""
    assert chat(answer) == expected


def test_only_the_top_level_fingerprint_is_touched() -> None:
    """D1: every other value keeps its bytes."""
    assert chat(b'{"a":{"system_fingerprint":"fp"}}') == b'{"a":{"system_fingerprint":"fp"}' + FINGERPRINT


@pytest.mark.rule("D1", "Every other value keeps its bytes.")
def test_values_keep_their_bytes_and_keys_their_order() -> None:
    """D1: numbers as they were written, escapes as they were chosen."""
    inside = '"z":1.10,"a":123456789012345678901234567890,"e":1E+2,"n":-0.0,"u":"\\u00e9é\\/","o":{"b":1,"a":[ 2 ]}'
    assert chat(f"{{{inside}}}".encode()) == f"{{{inside}".encode() + FINGERPRINT


@pytest.mark.parametrize("answer", [b'{"b":1.10, "a" : [1e5]}', b'{"system_fingerprint":"fp"}', b"[0.10]"])
def test_other_endpoints_answers_are_left_as_they_are(answer: bytes) -> None:
    """D1, C14: there is no fingerprint in an embedding."""
    assert result_body(b" " + answer + b"\n", endpoint=EMBED) == answer


@pytest.mark.parametrize("endpoint", [CHAT, EMBED])
@pytest.mark.parametrize("answer", [b"[1,2.50]", b'"text"', b"null", b"true", b"0.10", b"[]"])
def test_json_that_is_no_object_is_kept(endpoint: str, answer: bytes) -> None:
    """D1: it is JSON, so it is an answer."""
    assert result_body(answer, endpoint=endpoint) == answer


NOT_JSON = [
    b"",
    b" \n",
    b"<html></html>",
    b"data: {}\n\n",
    b"{",
    b'{"a":',
    b'{"a":1',
    b'{"a":1}}',
    b'{"a":1} {"b":2}',
    b'{"a":1,}',
    b"{'a':1}",
    b'{"a":NaN}',
    b'{"a":Infinity}',
    b'{"a":01}',
    b'{"a":+1}',
    b'{"a":"\\x"}',
    b'{"a":"\x01"}',
    b'{"a":"\x1c"}',
    b'{"a":"\xff"}',
    b'{"a":"\xed\xa0\x80"}',
    b"\xef\xbb\xbf{}",
    b"\xff",
    b"[" * 100_000,
    b"[" * 900 + b"]" * 900,
    b'{"a":' * 900 + b"1" + b"}" * 900,
    b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b"[" * 100_000 + b"]" * 100_000,
]


@pytest.mark.parametrize("endpoint", [CHAT, EMBED])
@pytest.mark.parametrize("answer", NOT_JSON, ids=range(len(NOT_JSON)))
def test_what_is_no_json_is_no_answer(endpoint: str, answer: bytes) -> None:
    """D1: cut off, no UTF-8, nested too deep to read, or something else altogether."""
    assert result_body(answer, endpoint=endpoint) is None


@pytest.mark.parametrize("endpoint", [CHAT, EMBED])
@pytest.mark.parametrize("answer", [b'{"a":"x\ny"}', b'{"a":"x\ry"}', b'["x\ny"]', b'{"x\ny":1}'])
def test_a_line_end_inside_a_string_is_no_json_and_is_not_mended(endpoint: str, answer: bytes) -> None:
    """D1: JSON strings must escape it; an answer with it is an upstream's fault, not a string with a blank."""
    assert result_body(answer, endpoint=endpoint) is None


TEXT = (st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda text: text != "error")) | st.sampled_from(
    ["\u2028", "a\u2029b", "\u0085", "\r\n", "\x1c"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@given(
    document=JSON,
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
    endpoint=st.sampled_from([CHAT, EMBED]),
)
def test_every_output_line_is_one_line_of_json(
    document: Any, indent: int | None, ascii_only: bool, endpoint: str
) -> None:
    """D1: for readers that split at LF and for `str.splitlines()`; and the values stay the same."""
    answer = json.dumps(document, indent=indent, ensure_ascii=ascii_only).encode()
    body = result_body(answer, endpoint=endpoint)
    assert body is not None
    line = output_line("id", b'"c"', Success(200, None, body))
    assert line.endswith(b"\n")
    assert len(line.split(b"\n")) == 2
    assert len(line.decode().splitlines()) == 1
    told = json.loads(line)["response"]["body"]
    if endpoint == CHAT and isinstance(document, dict):
        assert told == {**document, "system_fingerprint": None}
    else:
        assert told == document


@given(document=JSON, at=st.integers(0, 40), byte=st.integers(0, 255))
def test_a_damaged_answer_is_refused_or_still_json(document: Any, at: int, byte: int) -> None:
    """D1: one wrong byte never makes a line that cannot be read."""
    answer = bytearray(json.dumps({"a": document}, ensure_ascii=False).encode())
    answer[at % len(answer)] = byte
    body = chat(bytes(answer))
    if body is not None:
        line = output_line("id", b'"c"', Success(200, None, body))
        assert len(line.decode().splitlines()) == 1
        json.loads(line)
