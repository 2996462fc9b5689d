"""Bounds on what a stranger can send. The defaults are the contract's; every one is a setting."""

from msgspec import Struct

MAX_FAULTS = 100
"""Offending lines listed for one input file, so that one round can fix them all."""

MAX_METADATA_BYTES = 64 * 1024
MAX_JSON_BODY_BYTES = 1024 * 1024
QUOTED_CHARACTERS = 200
"""How much of a client's own text an error message repeats."""

STRIKES = 3
"""Workers that may die on a line before it is given up."""


def runs_alone(strikes: int) -> bool:
    """Whether a shard is run with nothing beside it, so that the next death is its own. One death may have any
    cause, and running everything apart after it would hold up whole batches of slow lines."""
    return strikes >= STRIKES - 1


class InputLimits(Struct, frozen=True, kw_only=True):
    max_bytes: int = 209_715_200
    max_lines: int = 50_000
    max_line_bytes: int = 1_048_576
    endpoints: tuple[str, ...] = ("/v1/chat/completions",)


class ShardLimits(Struct, frozen=True, kw_only=True):
    """How work is cut: small enough to spread over workers, large enough to be cheap to lease."""

    max_lines: int = 256
    max_bytes: int = 4 * 1024 * 1024
    min_lines: int = 8
    pieces: int = 64

    def lines_for(self, total: int) -> int:
        """Small and slow batches are cut finer."""
        return min(self.max_lines, max(self.min_lines, total // self.pieces))
