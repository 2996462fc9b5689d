"""Money is exact: D4. Amounts are integer nano-units, and what an answer costs follows from its tokens alone."""

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchline.domain.money import NANO, Price, Tariff, nano, units
from batchline.domain.usage import Usage

PRICE = Price(input=nano(Decimal("0.15")), cached_input=nano(Decimal("0.075")), output=nano(Decimal("0.6")))


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0"),
        (1, "0.000000001"),
        (-1, "-0.000000001"),
        (5 * NANO, "5"),
        (1_500_000_000, "1.5"),
        (-2_000_000_010, "-2.00000001"),
        (10 * NANO, "10"),
    ],
)
def test_an_amount_reads_as_a_person_writes_it(amount: int, text: str) -> None:
    assert units(amount) == text


@given(st.integers(-(10**18), 10**18))
def test_no_amount_is_lost_between_units_and_nano_units(amount: int) -> None:
    assert nano(Decimal(units(amount))) == amount


@pytest.mark.rule("D4", "Money is whole nano-units: what takes rounding is refused.")
@pytest.mark.parametrize("text", ["0.0000000001", "1e-10", "1.00000000000000000000000000001", "NaN", "Infinity"])
def test_what_is_no_whole_number_of_nano_units_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="nine decimal places"):
        nano(Decimal(text))


def test_a_price_is_for_a_million_tokens() -> None:
    """Cached input has a price of its own."""
    usage = Usage(input_tokens=1_000_000, cached_tokens=400_000, output_tokens=500_000)
    assert PRICE.cost(usage, percent=100) == 90_000_000 + 30_000_000 + 300_000_000


def test_an_answer_is_rounded_down_once_after_its_parts_are_summed() -> None:
    """3 tokens in at 1.1 and 1 out at 0.7 nano-units each, half of it: 2 of 2.0."""
    price = Price(input=1_100_000, output=700_000)
    assert price.cost(Usage(input_tokens=3, output_tokens=1), percent=50) == 2
    assert price.cost(Usage(input_tokens=1), percent=50) == 0
    assert Price(input=3_900_000).cost(Usage(input_tokens=1), percent=80) == 3


def test_more_cached_tokens_than_input_are_no_discount() -> None:
    """An upstream may report more cached than input tokens; the cost is never negative."""
    usage = Usage(input_tokens=10, cached_tokens=1000)
    assert PRICE.cost(usage, percent=100) == PRICE.cost(Usage(input_tokens=10, cached_tokens=10), percent=100)


@pytest.mark.rule("D4", "A line costs the batch's share of the price.")
def test_a_line_of_a_batch_costs_half_of_a_call_that_somebody_waits_for() -> None:
    """By default; and nothing without metering."""
    usage = Usage(input_tokens=1000, output_tokens=1000)
    tariff = Tariff(metered=True, batch_percent=50)
    assert tariff.cost(PRICE, usage, synchronous=True) == 750_000
    assert tariff.cost(PRICE, usage, synchronous=False) == 375_000
    assert Tariff(metered=False, batch_percent=50).cost(PRICE, usage, synchronous=True) == 0
