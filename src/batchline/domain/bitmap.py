"""Which lines of a shard are settled: a bit a line, the lowest bit of the first byte first."""

from collections.abc import Iterable


def unsettled(settled: bytes, lines: int) -> list[int]:
    """Positions whose bit is not set."""
    bits = int.from_bytes(settled, "little")
    return [position for position in range(lines) if not bits >> position & 1]


def all_but(positions: Iterable[int], lines: int) -> bytes:
    """Everything settled except these."""
    bits = (1 << lines) - 1
    for position in positions:
        bits &= ~(1 << position)
    return bits.to_bytes((lines + 7) // 8, "little")
