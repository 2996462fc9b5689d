"""Which limit is probed, how the throughput there compares, and when the next probe is due (D9)."""

from itertools import cycle
from math import exp, log, sqrt

import pytest

from batchline.pipeline.dispatch.limiter.noise import Noise
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
    change, error = probe.compare(measure(100, latency=4.0), Noise())
    assert change == pytest.approx(0.0)
    assert error == pytest.approx(sqrt(1.5) * 0.3 / sqrt(2)), (
        "the rounds at the same limit differ by the most that counts"
    )


def noise_of(change: float) -> Noise:
    """Return the noise of an upstream whose rounds differ by so much."""
    noise = Noise()
    for _ in range(12):
        noise.add(measure(100), measure(100, latency=exp(change)))
    return noise


@pytest.mark.parametrize(("noise", "tries"), [(0.2, 4), (0.3, 6)], ids=["until it is known", "six times at most"])
def test_a_probe_that_shows_little_is_repeated(noise: float, tries: int) -> None:
    """On a machine whose speed changes, one round that is better shows nothing."""
    probe, learnt, changes, errors = Probe(), noise_of(noise), list[float](), list[float]()
    probe.begin(measure(100), cap=1000, lowest=10)
    for latency in cycle([1.0, 1.33]):
        probe.during = measure(133, latency=latency)
        change, error = probe.compare(measure(100), learnt)
        changes.append(change)
        errors.append(error)
        if not probe.is_unclear(change, error, least=0.1):
            break
    assert len(errors) == tries
    assert errors == sorted(errors, reverse=True)
    assert changes[-1] == pytest.approx(log(1.33) / 2), "half of the tries gained a third, and the others nothing"


@pytest.mark.parametrize(("noise", "latency"), [(0.02, 1.0), (0.2, 0.5)], ids=["steady", "far better"])
def test_a_probe_that_is_clear_is_not_repeated(noise: float, latency: float) -> None:
    probe = Probe()
    probe.begin(measure(100), cap=1000, lowest=10)
    probe.during = measure(133, latency=latency)
    change, error = probe.compare(measure(100), noise_of(noise))
    assert not probe.is_unclear(change, error, least=0.1)


@pytest.mark.parametrize(
    ("upwards", "change", "again"),
    [(False, -0.15, False), (False, 0.1, True), (True, -0.15, True)],
    ids=["lower and worse", "lower and better", "higher and worse"],
)
def test_a_lower_limit_that_seems_worse_is_not_tried_again(upwards: bool, change: float, again: bool) -> None:
    """It would only shorten a queue, and each try costs throughput. A higher one may bring much."""
    probe = Probe()
    probe.upwards = upwards
    probe.begin(measure(100), cap=1000, lowest=60)
    probe.during = measure(probe.limit, latency=probe.limit / 100 / exp(change))
    seen, error = probe.compare(measure(100), noise_of(0.2))
    assert seen == pytest.approx(change)
    assert probe.is_unclear(seen, error, least=-0.02) is again


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
