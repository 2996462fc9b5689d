"""Decides when a batch is held (G6): no further line starts, because nearly all of its lines fail for the same reason.

::

    trial   ──> watching ──> off       (too many lines did not fail: it cannot be held any more)
       │           │          ^
       └─> held <──┘          │
             └────────────────┘        (released by its owner)

At first only a small sample of the lines may run, the *trial*, whatever the number of workers. So a mistake in every
line costs the requests of the trial. The other lines are withheld until the trial shows that not all of them fail.
"""

from collections.abc import Iterable, Sequence

from batchline.domain.progress import LineErrors
from batchline.domain.states import Hold

TRIAL_LINES = 64
"""Lines of a batch that run before the others may. Under 200 lines of a mistaken batch may run, also if workers die
over some of them, and a slow upstream needs a few dozen in parallel."""
TRIAL_SHARDS = 8
"""The trial is taken from so many places of the work file, because neighbours have the same model and similar text."""

_MIN_RECORDED_LINES = 20
_FAILED_SHARE = (19, 20)
_RETRIED_CODES = frozenset({"internal_error", "rate_limit_exceeded"})
"""Codes of lines that failed after retries: the upstream is at fault, and later lines may succeed."""


def main_error(errors: Iterable[LineErrors]) -> LineErrors | None:
    """Return the code that most lines failed with, of those that are not retried."""
    lasting = [error for error in errors if error.code not in _RETRIED_CODES]
    return max(lasting, key=lambda error: error.count, default=None)


def judge(hold: Hold, errors: Sequence[LineErrors], *, recorded: int, total: int, running: bool) -> Hold:
    """Return whether a batch is held after lines of it were recorded.

    ``running`` says whether any line of it could run now. If none of the trial is left, the other lines must run.
    """
    if hold not in (Hold.TRIAL, Hold.WATCHING):
        return hold
    most, of = _FAILED_SHARE
    worst = main_error(errors)
    others = recorded - (0 if worst is None else worst.count)
    if of * others > (of - most) * total:
        return Hold.OFF
    if _MIN_RECORDED_LINES <= recorded < total and of * (recorded - others) >= most * recorded:
        return Hold.HELD
    if hold is Hold.TRIAL and running and recorded < _MIN_RECORDED_LINES:
        return Hold.TRIAL
    return Hold.WATCHING


def choose_trial(lines_of_shards: Sequence[int]) -> dict[int, list[int]]:
    """Return the lines that run first: by the number of a shard, their positions in it."""
    if sum(lines_of_shards) <= TRIAL_LINES:
        return {n: list(range(lines)) for n, lines in enumerate(lines_of_shards)}
    places = min(TRIAL_SHARDS, len(lines_of_shards))
    lines_each = -(-TRIAL_LINES // places)
    chosen = (place * len(lines_of_shards) // places for place in range(places))
    return {n: _spread(lines_of_shards[n], lines_each) for n in chosen}


def _spread(lines: int, number: int) -> list[int]:
    """Return positions spread evenly over a shard."""
    if lines <= number:
        return list(range(lines))
    return [place * lines // number for place in range(number)]
