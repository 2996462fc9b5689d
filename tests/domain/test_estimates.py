"""Tokens that are estimated by size, and what a request may cost: E2, D4."""

import json
from typing import Any

import pytest

from batchline.domain.estimates import (
    FREE,
    Estimate,
    estimated_cost,
    output_limit,
    oversized_usage,
    request_tokens,
    text_tokens,
)
from batchline.domain.models import Model
from batchline.domain.money import Price, Tariff
from batchline.domain.usage import Usage

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
        ({"n": 128}, None),
        ({"max_tokens": 1, "n_predict": 100}, 100),
        ({"max_tokens": 1, "max_new_tokens": 100}, 100),
        ({"max_tokens": "7", "n": "3"}, 21),
        ({"max_tokens": 7, "n_cmpl": 3}, 21),
        ({"max_tokens": 7, "best_of": "many", "n": 2}, 14),
        ({"max_tokens": "many", "max_output_tokens": 7}, 7),
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


@pytest.mark.rule("D4", "Without a limit, usual tokens are held for each of the answers.")
@pytest.mark.parametrize("name", ["n", "n_cmpl", "best_of"])
def test_each_answer_that_is_asked_for_costs_a_usual_output(name: str) -> None:
    """D4: a request for 128 answers costs 128 times as much."""
    body = b'{"%b":128,"x":[]}' % name.encode()
    estimate = estimated_cost(body, _PRICED, _METERED, synchronous=True)
    assert estimate.likely - estimate.least == 128 * 10_240


def test_an_answer_over_the_size_limit_costs_at_most_what_was_held() -> None:
    """E2: its bytes may be more than its tokens, such as those of logprobs."""
    assert oversized_usage(request=b'{"max_tokens":7}', answer_bytes=1000) == Usage(input_tokens=4, output_tokens=7)
    assert oversized_usage(request=b"{}", answer_bytes=1000) == Usage(input_tokens=1, output_tokens=250)
    assert oversized_usage(request=b"{}", answer_bytes=10**9) == Usage(input_tokens=1, output_tokens=1024)


def test_an_input_costs_no_more_than_the_model_takes() -> None:
    """D6: what is longer is cut or refused."""
    short = Model(id="m", name="m", price=Price(input=1_000_000), max_tokens=5)
    assert estimated_cost(b"{" + b" " * 4000 + b"}", short, _METERED, synchronous=True).least == 5


def test_nothing_is_estimated_where_nothing_is_charged() -> None:
    assert estimated_cost(b"{}", Model(id="m", name="m"), _METERED, synchronous=True) is FREE
    assert estimated_cost(b"{}", _PRICED, Tariff(metered=False, batch_percent=50), synchronous=True) is FREE
