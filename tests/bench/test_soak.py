"""The soak finds what it looks for: growth, descriptors that are left, slow reads and lines that are missing."""

import pytest

from bench.soak.__main__ import _judge
from bench.soak.tenants import Tally


def _tally(*, created: int = 100, accounted: int = 100, seconds: float = 0.01) -> Tally:
    tally = Tally()
    tally.count("lines created", created)
    tally.count("lines accounted for", accounted)
    tally.read_seconds = [seconds] * 200
    return tally


def _samples(*, growth: float = 0.0, left: int = 0) -> list[tuple[float, float, int]]:
    return [(minute, 100 + growth * minute, 50 + (left if minute == 29 else 0)) for minute in range(30)]


def test_a_run_that_is_well_has_no_problems() -> None:
    assert _judge(_tally(), _samples()) == []


@pytest.mark.parametrize(
    ("tally", "samples", "problem"),
    [
        (_tally(), _samples(growth=4), "memory grew from"),
        (_tally(), _samples(left=40), "descriptors grew from 50 to 90"),
        (_tally(seconds=0.2), _samples(), "reads take 200 ms"),
        (_tally(accounted=99), _samples(), "100 lines, 99 accounted for"),
    ],
)
def test_a_problem_is_named(tally: Tally, samples: list[tuple[float, float, int]], problem: str) -> None:
    [found] = _judge(tally, samples)
    assert found.startswith(problem)
