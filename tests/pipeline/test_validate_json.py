"""What counts as JSON in an input file (C4), compared with a strict reader of the standard library."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchline.domain.limits import InputLimits
from batchline.pipeline.validate import validate_file

CHAT = "/v1/chat/completions"
BOM = b"\xef\xbb\xbf"
BLANK = ""
OBJECT = "object"
NOT_JSON = "is not valid JSON"
NOT_OBJECT = "must be a JSON object"


class Pairs(list[tuple[str, Any]]):
    """An object with its repeated keys, so that none escapes the check for surrogates."""


def refuse(constant: str) -> None:
    raise ValueError(constant)


def kind_of(text: bytes) -> str:
    """What a line is to the standard library, made strict."""
    if not text.strip(b" \t\r"):
        return BLANK
    try:
        value = json.loads(
            text.decode(), parse_int=str, parse_float=str, parse_constant=refuse, object_pairs_hook=Pairs
        )
        json.dumps(value, ensure_ascii=False).encode()
    except ValueError:
        return NOT_JSON
    return OBJECT if isinstance(value, Pairs) else NOT_OBJECT


NUMBERS = st.from_regex(rb"-?[0-9]{1,3}(\.[0-9]{0,2})?([eE][+-]?[0-9]{0,2})?", fullmatch=True)
ESCAPES = st.sampled_from([b"\\ud83d", b"\\ude00", b"\\uD800x", b"\\u00e9", b"\\u12g4", b"\\x", b'\\"', b"\\/", b"\\"])
FRAGMENTS = st.one_of(
    st.sampled_from([b"{", b"}", b"[", b"]", b",", b":", b'"', b'"a":', b'"body":{', b"null", b"true", b"NaN", b"-"]),
    st.sampled_from([b" ", b"\t", b"\r", b"\x00", b"\x0b", b"\x0c", b"\x1f", b"\x7f", b"\xff", b"\xc2\xa0", BOM]),
    st.text(max_size=3).map(lambda text: text.encode("utf-8", "surrogatepass")),
    NUMBERS,
    ESCAPES,
)
STRINGS = st.lists(st.one_of(ESCAPES, st.text(max_size=2).map(lambda text: text.encode(errors="replace"))), max_size=4)
LEAVES = st.one_of(
    NUMBERS, st.sampled_from([b"true", b"null", b"NaN"]), STRINGS.map(lambda parts: b'"' + b"".join(parts) + b'"')
)
KEYS = st.one_of(
    st.sampled_from([b'"custom_id"', b'"method"', b'"url"', b'"body"', b'"x"', b'"stream"']),
    STRINGS.map(lambda parts: b'"' + b"".join(parts) + b'"'),
)


def objects_of(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    pairs = st.tuples(KEYS, values).map(b":".join)
    return st.lists(pairs, max_size=4).map(lambda all_pairs: b"{" + b",".join(all_pairs) + b"}")


def arrays_of(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.lists(values, max_size=3).map(lambda items: b"[" + b" ,".join(items) + b"]")


VALUES = st.recursive(LEAVES, lambda inner: st.one_of(objects_of(inner), arrays_of(inner)), max_leaves=8)


@st.composite
def damaged(draw: Callable[[st.SearchStrategy[bytes]], bytes]) -> bytes:
    """Nearly JSON: a value with a fragment put in somewhere."""
    value, fragment, at = draw(VALUES), draw(FRAGMENTS), draw(st.binary(min_size=1, max_size=1))[0]
    return value[: at % (len(value) + 1)] + fragment + value[at % (len(value) + 1) :]


JSONISH = st.one_of(VALUES, damaged(), st.lists(FRAGMENTS, max_size=8).map(b"".join))


@pytest.mark.parametrize("examples", [40, pytest.param(400, marks=pytest.mark.proof)])
def test_json_is_what_an_independent_reader_takes(tmp_path: Path, examples: int) -> None:
    """C4: no line is accepted, refused or called an object otherwise than by a strict second opinion."""

    @settings(max_examples=examples, deadline=None)
    @given(lines=st.lists(JSONISH.map(lambda text: text.replace(b"\n", b" ")), min_size=1, max_size=20))
    def check(lines: list[bytes]) -> None:
        assert kinds_found(tmp_path, lines) == [kind_of(text) for text in lines]

    check()


def kinds_found(folder: Path, lines: list[bytes]) -> list[str]:
    """What validation made of each line; a first blank line keeps a byte-order mark from being the file's."""
    source = folder / "input.jsonl"
    source.write_bytes(b"\n".join([b"", *lines]))
    verdict = validate_file(source=source, work=folder / "work", endpoint=CHAT, limits=InputLimits())
    messages = {fault.line: fault.message for fault in verdict.faults}
    return [_kind(messages.get(number, ""), number) for number in range(2, len(lines) + 2)]


def _kind(message: str, number: int) -> str:
    """No line here is a whole request, so one without a fault was taken for blank."""
    words = message.removeprefix(f"Line {number} ")
    return words if words in {"", NOT_JSON, NOT_OBJECT} else OBJECT
