"""Tokens that are estimated by size, and what a request may cost: E2, D4."""

import json
from typing import Any

import pytest

from batchline.domain.estimates import FREE, Estimate, estimated_cost, output_limit, request_tokens, text_tokens
from batchline.domain.models import Model
from batchline.domain.money import Price, Tariff

_PRICED = Model(id="m", name="m", price=Price(input=1_000_000, output=10_000_000))
"""A token of the input costs one nano-unit, and one of the output ten."""
_METERED = Tariff(metered=True, batch_percent=50)


@pytest.mark.parametrize(("size", "tokens"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_a_token_stands_for_four_bytes(size: int, tokens: int) -> None:
    assert text_tokens(size) == tokens


def test_a_request_counts_whole() -> None:
    """E2: also its tools and the files inside it."""
    assert request_tokens(b'{"tools":[{"type":"function"}],"messages":[]}') == 12


def test_a_linked_image_counts_as_an_image() -> None:
    """E2: its link is short, and its tokens are many."""
    assert request_tokens(b'{"image_url":"https://e.org/a"}') > 800


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 0}, None),
        ({"max_tokens": -5}, None),
        ({"max_tokens": "many"}, None),
        ({"max_tokens": 7}, 7),
        ({"max_completion_tokens": 7}, 7),
        ({"max_output_tokens": 7}, 7),
        ({"max_tokens": 1, "max_completion_tokens": 100}, 100),
        ({"max_tokens": 7, "n": 3}, 21),
        ({"max_tokens": 7, "n": 2, "best_of": 4}, 28),
        ({"max_tokens": 7, "n": -3}, 7),
        ({"max_tokens": 10**30}, 2**31),
    ],
)
def test_the_limit_of_the_output_under_all_its_names(fields: dict[str, Any], limit: int | None) -> None:
    """D4: for all answers that are asked for."""
    assert output_limit(json.dumps(fields).encode()) == limit


def test_a_request_costs_its_input_and_its_limit_of_output() -> None:
    """D4: a usual output if it sets no limit; half in a batch."""
    limited, unlimited = b'{"max_tokens":10,"messages":[]}', b'{"messages":[]}'
    assert estimated_cost(limited, _PRICED, _METERED, synchronous=True) == Estimate(8 + 100, 8 + 100)
    assert estimated_cost(limited, _PRICED, _METERED, synchronous=False) == Estimate(54, 54)
    assert estimated_cost(unlimited, _PRICED, _METERED, synchronous=True) == Estimate(4, 4 + 10_240)


def test_an_input_costs_no_more_than_the_model_takes() -> None:
    """D6: what is longer is cut or refused."""
    short = Model(id="m", name="m", price=Price(input=1_000_000), max_tokens=5)
    assert estimated_cost(b"{" + b" " * 4000 + b"}", short, _METERED, synchronous=True).least == 5


def test_nothing_is_estimated_where_nothing_is_charged() -> None:
    assert estimated_cost(b"{}", Model(id="m", name="m"), _METERED, synchronous=True) is FREE
    assert estimated_cost(b"{}", _PRICED, Tariff(metered=False, batch_percent=50), synchronous=True) is FREE
