"""How many processes run lines: the rule on given numbers, and where there is only ever one."""

from collections.abc import Sequence
from typing import Any

import pytest

from batchline.app.workers.autoscaler import Autoscaler, CpuMeter
from batchline.app.workers.pool import max_worker_processes
from batchline.settings import Settings
from tests.support.clocks import SettableClock

_UPSTREAM = "http://127.0.0.1:9/v1"


def _changes(autoscaler: Autoscaler, looks: Sequence[Sequence[float]], *, runs_lines: bool = True) -> list[int]:
    """A look a second."""
    return [autoscaler.check(busy, runs_lines=runs_lines, at=float(at)) for at, busy in enumerate(looks)]


def test_one_that_cannot_keep_up_for_four_seconds_gets_help() -> None:
    """A shorter time would not repay what it takes to begin."""
    looks = [[0.85], [0.9], [1.0], [0.84], [0.85], [1.0], [1.2], [0.9]]
    assert _changes(Autoscaler(max_processes=2), looks) == [0, 0, 0, 0, 0, 0, 0, 1]


def test_busy_with_other_things_needs_no_help() -> None:
    """A worker process could not change it."""
    assert _changes(Autoscaler(max_processes=8), [[1.0]] * 5, runs_lines=False) == [0] * 5


def test_there_are_never_more_than_may_be() -> None:
    assert _changes(Autoscaler(max_processes=1), [[1.0]] * 5) == [0] * 5
    assert _changes(Autoscaler(max_processes=2), [[1.0, 1.0]] * 5) == [0] * 5


def test_a_further_one_comes_only_when_all_of_them_are_busy() -> None:
    """One that has just begun is not, and must show what it can do; on a machine with fewer free cores than it says,
    none of them ever is."""
    assert _changes(Autoscaler(max_processes=8), [[1.0, 0.0], [1.0, 0.5], *[[0.6, 0.6]] * 6]) == [0] * 8
    assert _changes(Autoscaler(max_processes=8), [[1.0, 0.0]] + [[1.0, 0.9]] * 4) == [0, 0, 0, 0, 1]


def test_who_is_not_needed_for_ten_seconds_goes() -> None:
    """And not before: a batch may follow the other."""
    assert _changes(Autoscaler(max_processes=4), [[0.3, 0.2]] * 11) == [0] * 10 + [-1]
    assert _changes(Autoscaler(max_processes=4), [[0.3, 0.2]] * 9 + [[0.6, 0.2]] + [[0.3, 0.2]] * 10) == [0] * 20


def test_one_fewer_must_have_room() -> None:
    """What two carry at 0.6 of a core stays with two; three with the same are one too many."""
    assert _changes(Autoscaler(max_processes=4), [[0.3, 0.3]] * 15) == [0] * 15
    assert -1 in _changes(Autoscaler(max_processes=4), [[0.2, 0.2, 0.2]] * 15)


def test_after_one_went_the_next_has_ten_seconds_again() -> None:
    assert (
        _changes(Autoscaler(max_processes=4), [[0.0, 0.0, 0.0]] * 11 + [[0.0, 0.0]] * 10) == [0] * 10 + [-1] + [0] * 10
    )


def test_a_share_of_a_core_is_measured_between_readings() -> None:
    clock = SettableClock()
    meter = CpuMeter(clock)
    clock.advance(1000)
    assert 0 <= meter.read() < 0.5
    sum(range(300_000))
    clock.advance(0.0001)
    assert meter.read() > 1


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"worker_processes": 3}, 3),
        ({"worker_processes": 1}, 1),
        ({"worker_processes": 3, "database_url": "postgresql://there/x"}, 1),
        ({"worker_processes": 3, "upstream_url": None}, 1),
        ({"worker_processes": 3, "models": {"topics": {"upstream": "classifier", "kind": "classification"}}}, 1),
    ],
)
def test_who_shares_the_machine_with_a_model_or_the_work_with_others_stays_alone(
    settings: dict[str, Any], most: int
) -> None:
    given: dict[str, Any] = {"upstream_url": _UPSTREAM} | settings
    assert max_worker_processes(Settings(**given)) == most


def test_there_may_be_one_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    assert max_worker_processes(Settings(upstream_url=_UPSTREAM)) == 6
