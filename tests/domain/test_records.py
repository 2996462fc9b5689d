"""Sums of charges, the usage of a batch, and text that stays on one line."""

import json

import pytest

from batchline.domain.records import Charge, by_model, escape_line_breaks, json_text
from batchline.domain.usage import Usage
from tests.support.records import make_batch


def test_charges_are_summed_by_model_and_sorted() -> None:
    """Every transaction locks the sums in this order, so that two cannot wait for each other."""
    charges = [
        Charge(model="b", requests=1, usage=Usage(input_tokens=1, cached_tokens=1), cost=10),
        Charge(model="a", requests=2, usage=Usage(output_tokens=5, reasoning_tokens=3), cost=20),
        Charge(model="b", requests=3, usage=Usage(input_tokens=2, output_tokens=4), cost=30),
    ]
    assert by_model(charges) == [
        Charge(model="a", requests=2, usage=Usage(output_tokens=5, reasoning_tokens=3), cost=20),
        Charge(model="b", requests=4, usage=Usage(input_tokens=3, cached_tokens=1, output_tokens=4), cost=40),
    ]


def test_the_usage_of_a_batch_has_all_four_counts() -> None:
    batch = make_batch(
        input_tokens=1,
        cached_tokens=2,
        output_tokens=3,
        reasoning_tokens=4,
    )
    assert batch.usage == Usage(input_tokens=1, cached_tokens=2, output_tokens=3, reasoning_tokens=4)


@pytest.mark.parametrize("text", ["plain", "a\nb", "\u2028", "a\u2029b", "\u0085", "\x0b\x0c\x1c", "é"])
def test_json_text_is_one_line_for_every_reader(text: str) -> None:
    """D1"""
    encoded = json_text(text)
    assert json.loads(encoded) == text
    assert len(encoded.decode().splitlines()) == 1


def test_ascii_is_not_copied() -> None:
    line = b'{"a":1}'
    assert escape_line_breaks(line) is line
