"""What the lowest latency seen says about a later round (D9)."""

import pytest

from batchline.pipeline.dispatch.limiter.latencies import Latencies
from batchline.pipeline.dispatch.limiter.rounds import Measure, Round


def add(latencies: Latencies, seconds: dict[str, float], *, in_flight: int = 4) -> Measure:
    """Complete a round in which each of these models has ``in_flight`` requests in flight, and return its measure."""
    total = in_flight * len(seconds)
    round_ = Round(total, size=total, full=True, part=1.0, since=0.0)
    for model in seconds:
        for _ in range(in_flight):
            assert round_.add(model, total, 0.0)
    for model, latency in seconds.items():
        for _ in range(in_flight):
            round_.end(model, total, in_flight, latency)
    round_.scale(latencies.usual)
    measure = round_.measure
    latencies.add(round_, measure)
    return measure


def test_the_lowest_latency_stays_when_requests_begin_to_wait() -> None:
    latencies = Latencies()
    add(latencies, {"m": 2.0})
    add(latencies, {"m": 1.0})
    add(latencies, {"m": 4.0})
    assert latencies.least_of_models == {"m": 1.0}
    assert latencies.mean_seconds == 4.0


def test_each_model_has_a_usual_latency_of_its_own() -> None:
    """The lowest one is a part of it: half of the first round here."""
    latencies = Latencies()
    add(latencies, {"quick": 0.1, "slow": 10.0})
    add(latencies, {"quick": 0.05, "slow": 5.0})
    assert latencies.least_of_models == pytest.approx({"quick": 0.05, "slow": 5.0})


def test_only_as_many_are_needed_as_the_throughput_keeps_busy() -> None:
    """Twice as many in flight that take twice as long bring nothing: half of them are enough."""
    latencies = Latencies()
    add(latencies, {"m": 1.0}, in_flight=4)
    assert latencies.least_limit(add(latencies, {"m": 2.0}, in_flight=8)) == pytest.approx(4.0)


@pytest.mark.parametrize(("seconds", "long"), [(0.1, False), (10.0, True)])
def test_a_wait_is_long_in_seconds_and_not_as_a_part_of_the_latency(seconds: float, *, long: bool) -> None:
    latencies = Latencies()
    add(latencies, {"m": seconds})
    assert latencies.wait_long(add(latencies, {"m": 2 * seconds})) is long
