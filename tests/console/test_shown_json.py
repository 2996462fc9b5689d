"""JSON as pages show it, with a bound on the work."""

import json
import tracemalloc

import pytest

from batchline.console.shown_json import SHOWN_CHARACTERS, shortened, shown_json, shown_text


@pytest.mark.parametrize(
    "value",
    [{}, [], None, True, 1.5, 'a\n"b"', {"a": [1, {"b": []}], "c": {}, "ü": "日本"}, [[1, 2], [3]]],
)
def test_a_small_value_is_written_whole(value: object) -> None:
    found = shown_json(value)
    assert found.text == json.dumps(value, indent=2, ensure_ascii=False)
    assert found.notices == []


def test_a_value_that_is_huge_when_it_is_indented_takes_little_memory_and_says_that_it_was_cut() -> None:
    nested: object = [0] * 100_000
    for _ in range(40):
        nested = [nested]
    tracemalloc.start()
    found = shown_json(nested)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(found.text) == SHOWN_CHARACTERS
    assert found.notices == ["Cut after 200,000 characters."]
    assert peak < 10_000_000


def test_what_lies_too_deep_is_left_out() -> None:
    nested: object = [0] * 100_000
    for _ in range(600):
        nested = {"a": nested}
    found = shown_json(nested)
    assert len(found.text) < 10_000
    assert "…" in found.text
    assert found.notices == ["What lies deeper than 50 levels is left out."]


def test_long_strings_are_shortened_and_data_is_named() -> None:
    image = f"data:image/png;base64,{'A' * 700_000}"
    found = shown_json({"url": image, "text": "w" * 30_000, "k" * 30_000: 1})
    assert '"[image/png, 700.0 KB]"' in found.text
    assert "[30.0 KB in all]" in found.text
    assert len(found.text) < 2_000
    assert found.notices == ["Long strings are shortened."]
    assert shortened("short", longest=5) == "short"
    assert shortened("data:image/png;base64,AA", longest=100) == "data:image/png;base64,AA"


def test_a_text_that_is_cut_says_so() -> None:
    assert shown_text("short").notices == []
    found = shown_text("w" * 712_345)
    assert (len(found.text), found.notices) == (SHOWN_CHARACTERS, ["Cut after 200,000 of 712,345 characters."])
