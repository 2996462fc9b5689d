"""JSON that is nested too deeply to be read everywhere."""

from collections.abc import Callable

import pytest
from msgspec import json

from batchline.domain.nesting import is_nested_too_deeply

_CALLS = 250
"""More than the program is ever in when it reads JSON."""


def _arrays(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


def _objects(levels: int) -> bytes:
    return b'{"a":' * levels + b"1" + b"}" * levels


def _decode_below(calls: int, data: bytes) -> object:
    return _decode_below(calls - 1, data) if calls else json.decode(data)


@pytest.mark.parametrize("nested", [_arrays, _objects])
def test_what_is_accepted_can_be_read_far_down_the_stack(nested: Callable[[int], bytes]) -> None:
    """C4"""
    levels = range(200, 1100, 10)
    accepted = [count for count in levels if not is_nested_too_deeply(nested(count))]
    for count in accepted:
        _decode_below(_CALLS, nested(count))
    assert 400 in accepted
    assert not any(count >= 700 for count in accepted)


@pytest.mark.parametrize("flat", [b"[" + b"[]," * 5000 + b"[]]", b'["' + b"[{" * 5000 + b'"]'], ids=["many", "text"])
def test_brackets_that_are_not_nested_do_not_matter(flat: bytes) -> None:
    """C4"""
    assert not is_nested_too_deeply(flat)
