"""Prints what the limiter reaches with each upstream."""

from collections.abc import Iterable

from tests.support.zoo.cases import CASES
from tests.support.zoo.runs import Case, Result


def print_table(names: Iterable[str], *, seeds: range) -> bool:
    """Print a row for each case, and return whether all goals were reached."""
    print(f"{'':26}{'ideal':>8}{'worst':>7}{'mean':>7}{'99 %':>7}{'goal':>7}{'failed':>8}{'refused':>9}{'peak':>6}")
    rows = [_print_row(name, CASES[name], [CASES[name].run(seed) for seed in seeds]) for name in names]
    return all(rows)


def _print_row(name: str, case: Case, results: list[Result]) -> bool:
    shares = [result.share for result in results]
    most, failed = min(result.share_of_most for result in results), sum(result.failed for result in results)
    refused, peak = max(result.refused for result in results), max(result.peak for result in results)
    reached = min(shares) >= case.goal
    print(
        f"{name:26}{case.ideal_seconds:6.1f} s{min(shares):7.2f}{sum(shares) / len(shares):7.2f}{most:7.2f}"
        f"{case.goal:7.2f}{failed:8}{refused:9}{peak:6}{'' if reached else '  below the goal'}",
        flush=True,
    )
    return reached and not failed
