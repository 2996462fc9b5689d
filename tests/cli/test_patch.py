"""Options of the form NAME=VALUE."""

import click
import pytest

from batchline.cli.patch import Assignment, merge_patch, patch_of


def test_values_are_json_if_they_can_be() -> None:
    given = (("model", "big"), ("temperature", "0.5"), ("stop", '["a"]'), ("user", "null"), ("flag", "true"))
    assert patch_of(given) == {"model": "big", "temperature": 0.5, "stop": ["a"], "user": None, "flag": True}


def test_dots_lead_into_objects() -> None:
    given = (("response_format.type", "json_object"), ("response_format.strict", "true"))
    assert patch_of(given) == {"response_format": {"type": "json_object", "strict": True}}


def test_a_field_cannot_be_a_value_and_an_object() -> None:
    with pytest.raises(click.UsageError, match=r"--set a\.b"):
        patch_of((("a", "1"), ("a.b", "2")))


@pytest.mark.parametrize("text", ["model", "=x", ""])
def test_what_is_no_assignment_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="expected NAME=VALUE"):
        Assignment().convert(text, None, None)
    assert Assignment().convert("a=b=c", None, None) == ("a", "b=c")


def test_a_patch_is_merged_as_the_rfc_says() -> None:
    """RFC 7396: null removes, objects are merged, anything else replaces."""
    body = {"model": "a", "keep": 1, "format": {"type": "x", "strict": True}, "stop": ["a"]}
    patch = {"model": "b", "keep": None, "format": {"type": "y"}, "stop": ["b"], "new": {"a": None, "b": 1}}
    assert merge_patch(body, patch) == {
        "model": "b",
        "format": {"type": "y", "strict": True},
        "stop": ["b"],
        "new": {"b": 1},
    }
