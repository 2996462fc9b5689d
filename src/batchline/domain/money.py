"""Money: integer nano-units of whatever currency the operator thinks in, so that sums are exact."""

from decimal import Decimal
from fractions import Fraction

from msgspec import Struct

from batchline.domain.usage import Usage

NANO = 10**9
_PRICED_TOKENS = 1_000_000


def nano(amount: Decimal) -> int:
    """Units as nano-units. Raises ValueError where that takes rounding, or is no amount."""
    scaled = Fraction(amount) * NANO if amount.is_finite() else None
    if scaled is None or scaled.denominator != 1:
        raise ValueError("an amount has at most nine decimal places")
    return scaled.numerator


def units(amount: int) -> str:
    """Nano-units as a person writes them: 1.5, -0.000000001, 20."""
    whole, part = divmod(abs(amount), NANO)
    decimals = f".{part:09}".rstrip("0").rstrip(".")
    return f"{'-' if amount < 0 else ''}{whole}{decimals}"


class Price(Struct, frozen=True, kw_only=True):
    """Nano-units for a million tokens."""

    input: int = 0
    cached_input: int = 0
    output: int = 0

    def cost(self, usage: Usage, *, percent: int) -> int:
        """Of one answer, at so many percent of the price, rounded down to the nano-unit."""
        cached = min(usage.cached_tokens, usage.input_tokens)
        full = (
            (usage.input_tokens - cached) * self.input + cached * self.cached_input + usage.output_tokens * self.output
        )
        return full * percent // (100 * _PRICED_TOKENS)


class Tariff(Struct, frozen=True, kw_only=True):
    """What answers cost: nothing where nobody is metered, and less in a batch than for somebody who waits."""

    metered: bool
    batch_percent: int

    def cost(self, price: Price, usage: Usage, *, synchronous: bool) -> int:
        """Of one answer."""
        return price.cost(usage, percent=100 if synchronous else self.batch_percent) if self.metered else 0
