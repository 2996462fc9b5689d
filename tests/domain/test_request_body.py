"""The body of a request as a JSON object."""

import pytest

from batchline.domain.errors import InvalidRequest
from batchline.domain.request_body import parse_json_object


def test_values_keep_their_bytes() -> None:
    fields = parse_json_object(b'{"a": 1.10, "b" : {"c":  [1e5]}}')
    assert {name: bytes(value) for name, value in fields.items()} == {"a": b"1.10", "b": b'{"c":  [1e5]}'}


@pytest.mark.parametrize("body", [b"", b"[]", b'"a"', b"null", b"{", b'{"a":1}}', b"\xff", b"[" * 100_000])
def test_anything_but_an_object_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        parse_json_object(body)


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        parse_json_object(b'{"metadata":' * 900 + b"1" + b"}" * 900)


def test_invalid_utf8_in_a_value_is_refused() -> None:
    """The decoder does not look into raw values, so the whole body is checked."""
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        parse_json_object(b'{"a":"\xff"}')
