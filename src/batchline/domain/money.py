"""Computes prices in integer nano-units of the operator's currency, so that sums are exact."""

from decimal import Decimal
from fractions import Fraction

from msgspec import Struct

from batchline.domain.usage import Usage

NANO = 10**9
MAX_AMOUNT = 10**9
"""The largest amount that a client may name, in units. In nano-units it must fit into a 64-bit column."""
_PRICED_TOKENS = 1_000_000


def nano(amount: Decimal) -> int:
    """Return units as nano-units. Raise ValueError if the amount is not finite or would have to be rounded."""
    scaled = Fraction(amount) * NANO if amount.is_finite() else None
    if scaled is None or scaled.denominator != 1:
        raise ValueError("an amount has at most nine decimal places")
    return scaled.numerator


def units(amount: int) -> str:
    """Return nano-units as a person writes units: 1.5, -0.000000001, 20."""
    whole, fraction = divmod(abs(amount), NANO)
    decimals = f".{fraction:09}".rstrip("0").rstrip(".")
    return f"{'-' if amount < 0 else ''}{whole}{decimals}"


class Price(Struct, frozen=True, kw_only=True):
    """The price of a million tokens, in nano-units."""

    input: int = 0
    cached_input: int = 0
    output: int = 0

    @property
    def is_zero(self) -> bool:
        """Whether every answer is free."""
        return not (self.input or self.cached_input or self.output)

    def cost(self, usage: Usage, *, percent: int) -> int:
        """Return the cost of one answer at a percentage of the price, rounded down to the nano-unit."""
        cached = min(usage.cached_tokens, usage.input_tokens)
        full = (
            (usage.input_tokens - cached) * self.input + cached * self.cached_input + usage.output_tokens * self.output
        )
        return full * percent // (100 * _PRICED_TOKENS)


class Tariff(Struct, frozen=True, kw_only=True):
    """The cost of answers: nothing without metering, and less in a batch than in a synchronous call."""

    metered: bool
    batch_percent: int

    def cost(self, price: Price, usage: Usage, *, synchronous: bool) -> int:
        """Return the cost of one answer."""
        return price.cost(usage, percent=100 if synchronous else self.batch_percent) if self.metered else 0
