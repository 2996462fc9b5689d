"""Options of the form NAME=VALUE."""

import click
import pytest

from batchline.cli.patch import Assignment, patch_of


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


@pytest.mark.parametrize("given", [(".".join("a" * 102), "1"), ("a", '{"a":' * 102 + "1" + "}" * 102)])
def test_a_patch_that_is_nested_too_deep_is_refused(given: tuple[str, str]) -> None:
    """The lines of a file are not read in vain before the run ends with an error that nobody expects."""
    with pytest.raises(click.UsageError, match="nested too deep"):
        patch_of((given,))
