"""The soak finds what it looks for: growth, descriptors that are left, slow reads and lines that are missing."""

from threading import Event

import psutil  # type: ignore[import-untyped]
import pytest

from bench.soak.__main__ import _judge
from bench.soak.tenants import Tally, repeat


def _tally(*, created: int = 100, accounted: int = 100, seconds: float = 0.01) -> Tally:
    tally = Tally()
    tally.count("lines created", created)
    tally.count("lines accounted for", accounted)
    tally.read_seconds = [seconds] * 200
    return tally


def _samples(*, growth: float = 0.0, left: int = 0) -> list[tuple[float, float, int]]:
    return [(minute, 100 + growth * minute, 50 + (left if minute >= 20 else 0)) for minute in range(30)]


def test_a_run_that_is_well_has_no_problems() -> None:
    assert _judge(_tally(), _samples()) == []


@pytest.mark.parametrize(
    ("tally", "samples", "problem"),
    [
        (_tally(), _samples(growth=4), "memory grew from"),
        (_tally(), _samples(left=40), "descriptors grew from 50 to 90"),
        (_tally(seconds=0.2), _samples(), "reads take 200 ms"),
        (_tally(accounted=99), _samples(), "100 lines, 99 accounted for"),
        (_tally(), _samples()[:5], "too few samples"),
    ],
)
def test_a_problem_is_named(tally: Tally, samples: list[tuple[float, float, int]], problem: str) -> None:
    [found] = _judge(tally, samples)
    assert found.startswith(problem)


def test_one_sample_with_more_descriptors_is_no_growth() -> None:
    samples = _samples()
    assert _judge(_tally(), [*samples[:-1], (29, 100, 90)]) == []


def test_a_run_without_a_read_has_a_problem() -> None:
    tally = _tally()
    tally.read_seconds = []
    assert _judge(tally, _samples()) == ["nothing was read"]


def test_any_error_of_a_client_is_a_fault() -> None:
    """Its thread must not end without a word."""
    stop, tally, calls = Event(), Tally(), list[int]()

    def step() -> None:
        calls.append(1)
        if len(calls) == 2:
            stop.set()
        raise psutil.NoSuchProcess(1)

    repeat(step, every=0.0, stop=stop, tally=tally)
    assert len(calls) == len(tally.faults) == 2


def test_what_the_reader_wrote_is_tallied() -> None:
    tally = Tally()
    tally.note_reads(["0.5", "/v1/files answered 500"])
    assert (tally.read_seconds, tally.faults) == ([0.5], ["/v1/files answered 500"])
