"""``python -m bench.zoo [KIND ...]`` measures how near batchline comes to an all-knowing client.

Each kind of upstream gets a fresh service with default settings. `cases.py` says what is measured, and what the
share of the ideal is. Needs about twenty minutes, and a machine that does nothing else.
"""

import sys

import click

from bench.zoo.cases import CASES, Case


def run_case(kind: str, case: Case) -> bool:
    """Run one kind, print its row, and return whether the goal was reached."""
    result = case.measure(kind)
    end, seen = result.end, result.seen
    share = result.ideal_seconds / end.seconds
    reached = share >= case.goal and not end.open and not end.failed
    print(
        f"{kind:12}{result.ideal_seconds:7.1f} s{end.seconds:8.1f} s{share:8.2f}{case.goal:8.2f}"
        f"{end.failed:8}{end.open:6}{seen.refused:9}{seen.peak:6}{'' if reached else '  BELOW GOAL'}",
        flush=True,
    )
    return reached


@click.command()
@click.argument("kinds", nargs=-1, type=click.Choice(list(CASES)))
def main(kinds: tuple[str, ...]) -> None:
    """Measure how near batchline comes to an all-knowing client, for all kinds of upstreams or for these."""
    print(f"{'':12}{'ideal':>9}{'took':>10}{'share':>8}{'goal':>8}{'failed':>8}{'open':>6}{'refused':>9}{'peak':>6}")
    reached = [run_case(kind, CASES[kind]) for kind in kinds or CASES]
    print(f"{sum(reached)} of {len(reached)} upstreams were used as well as they should be")
    sys.exit(not all(reached))


if __name__ == "__main__":
    main()
