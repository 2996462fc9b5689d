"""Prompts with columns in braces."""

import re
from datetime import UTC, date, datetime
from decimal import Decimal

import pytest

from batchline.pipeline.rows.fault import RowsFault
from batchline.pipeline.rows.template import as_text, parse_template


def test_columns_are_filled_in() -> None:
    template = parse_template("--prompt", "Classify {my review} as {{json}}: {n}")
    assert template.columns == {"my review", "n"}
    assert template.fill({"my review": "good {n}", "n": 3}) == "Classify good {n} as {json}: 3"
    assert template.fill({"n": 3}) == "Classify  as {json}: 3", "an object of a JSONL table may lack a column"


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_text_is_refused(text: str) -> None:
    with pytest.raises(RowsFault, match="--prompt: the text is empty"):
        parse_template("--prompt", text)


@pytest.mark.parametrize("text", ["a {b", "a } b", "{a{b}}", "{a}}", "{{a}"])
def test_a_brace_without_a_partner_is_refused(text: str) -> None:
    with pytest.raises(RowsFault, match="a brace has no partner"):
        parse_template("--prompt", text)


@pytest.mark.parametrize("text", ["{}", "{a!r}", "{a:>3}", 'Answer as {"a": 1}'])
def test_only_names_stand_in_braces_and_doubled_ones_are_text(text: str) -> None:
    told = "write the name of a column in braces, and nothing else; {{ and }} stand for braces that are a part"
    with pytest.raises(RowsFault, match=re.escape(told)):
        parse_template("--prompt", text).require_columns(["a"])


@pytest.mark.parametrize("name", ["Note: x", "Really!", "a!b: c", "a[0].b", ":", "What? [yes"])
def test_any_name_without_braces_can_be_used(name: str) -> None:
    """Python's own formatting gives a meaning to some characters; here a name is only a name."""
    template = parse_template("--prompt", f"Say {{{name}}} in {{{{{{{name}}}}}}}")
    template.require_columns([name, "a"])
    assert template.fill({name: "yes"}) == "Say yes in {yes}"


def test_a_missing_column_is_named_with_those_that_exist() -> None:
    template = parse_template("--prompt", "{reviw}")
    with pytest.raises(RowsFault, match="no column 'reviw'; it has: id, review"):
        template.require_columns(["id", "review"])


@pytest.mark.parametrize(("value", "text"), [("a", "a"), (None, ""), (True, "true"), ([1, "b"], '[1,"b"]')])
def test_values_that_are_no_text_are_json(value: object, text: str) -> None:
    assert as_text(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (date(2026, 1, 2), "2026-01-02"),
        (datetime(2026, 1, 2, 3, 4, tzinfo=UTC), "2026-01-02T03:04:00Z"),
        (Decimal("1.50"), "1.50"),
    ],
)
def test_values_that_json_has_as_texts_have_no_quotes(value: object, text: str) -> None:
    """A Parquet file has dates and decimals."""
    assert as_text(value) == text
