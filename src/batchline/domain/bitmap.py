"""The bitmap of a shard: one bit per line, set when the line is recorded (settled), lowest bit of each byte first."""

from collections.abc import Iterable


def unsettled(settled: bytes, lines: int) -> list[int]:
    """Return the positions whose bit is not set."""
    bits = int.from_bytes(settled, "little")
    return [position for position in range(lines) if not bits >> position & 1]


def all_but(positions: Iterable[int], lines: int) -> bytes:
    """Return a bitmap of ``lines`` bits in which every bit is set except those at the positions."""
    bits = (1 << lines) - 1
    for position in positions:
        bits &= ~(1 << position)
    return bits.to_bytes((lines + 7) // 8, "little")
