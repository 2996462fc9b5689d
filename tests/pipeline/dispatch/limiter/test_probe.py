"""Which limit is probed, how the throughput there compares, and when the next probe is due (D9)."""

import pytest

from batchline.pipeline.dispatch.limiter.probe import Probe
from batchline.pipeline.dispatch.limiter.rounds import Measure


def measure(limit: int, *, latency: float = 1.0) -> Measure:
    """Return the measure of a full upstream whose requests all took as long."""
    return Measure(limit, [(float(limit), latency)] * 16)


@pytest.mark.parametrize(
    ("upwards", "cap", "lowest", "limit"),
    [(True, 1000, 10, 133), (False, 1000, 10, 60), (False, 1000, 90, 90), (False, 1000, 100, 133), (True, 100, 10, 60)],
    ids=["up", "far down", "not below the lowest", "up if none is lower", "down from the cap"],
)
def test_a_probe_stays_between_the_lowest_limit_and_the_cap(upwards: bool, cap: int, lowest: int, limit: int) -> None:
    probe = Probe()
    probe.upwards = upwards
    probe.begin(measure(100), cap=cap, lowest=lowest)
    assert (probe.home, probe.limit) == (100, limit)


def test_the_throughput_of_a_probe_is_compared_with_that_before_and_after_it() -> None:
    """An upstream that grows slower all the time would otherwise make every probe look worse."""
    probe = Probe()
    probe.begin(measure(100, latency=1.0), cap=1000, lowest=10)
    probe.during = measure(100, latency=2.0)
    change, error = probe.change(measure(100, latency=4.0))
    assert change == pytest.approx(0.0)
    assert error == 0.0


def test_probes_that_change_nothing_alternate_and_become_rarer() -> None:
    probe, waits = Probe(), list[int]()
    for _ in range(12):
        upwards, now = probe.upwards, 0.0
        probe.on_nothing_changed(now)
        assert probe.upwards is not upwards
        waits.append(next(seconds for seconds in range(1, 100) if probe.is_due(now + seconds)))
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (4, 30)


def test_a_lower_limit_that_was_enough_is_followed_by_a_still_lower_one_at_once() -> None:
    probe = Probe()
    probe.begin_descent(10.0, far=True)
    probe.on_fewer_enough(20.0)
    assert probe.is_due(20.0)
    assert not probe.upwards
