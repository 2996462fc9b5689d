"""Says whether requests are refused because they follow others too closely.

An upstream with a limit on the rate refuses a request soon after others, however many are in flight. With a limit on
the number in flight, it does not matter when the others have started.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

_FEWEST = 3
"""Fewer refused or accepted requests say nothing."""
_MOST_BEFORE = 3
"""The space before a request is measured from the last accepted one, from the second to last, and so on, since an
upstream may accept some at once."""


def gap_evidence(starts: Sequence[float], refused: Sequence[int]) -> float | None:
    """Return how often an accepted request had more space before it than a refused one: 0.5 by chance, 1 if always.

    ``refused`` has the indices of the refused starts. It is None if there are too few to say.
    """
    if min(len(refused), len(starts) - len(refused)) < _FEWEST:
        return None
    parts = [_part(starts, frozenset(refused), before) for before in range(1, _MOST_BEFORE + 1)]
    return max((part for part in parts if part is not None), default=None)


def _part(starts: Sequence[float], refused: frozenset[int], before: int) -> float | None:
    accepted: list[float] = []
    gaps: tuple[list[float], list[float]] = ([], [])
    for index, start in enumerate(starts):
        is_refused = index in refused
        if len(accepted) >= before:
            gaps[is_refused].append(start - accepted[-before])
        if not is_refused:
            accepted.append(start)
    of_accepted, of_refused = map(sorted, gaps)
    if min(len(of_accepted), len(of_refused)) < _FEWEST:
        return None
    less = sum(bisect_left(of_refused, gap) + bisect_right(of_refused, gap) for gap in of_accepted)
    return less / (2 * len(of_accepted) * len(of_refused))
