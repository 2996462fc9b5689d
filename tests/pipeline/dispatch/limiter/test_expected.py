"""When the throughput at a limit that is held counts as changed (D9)."""

import pytest

from batchline.pipeline.dispatch.limiter.expected import Expected
from batchline.pipeline.dispatch.limiter.noise import Noise
from batchline.pipeline.dispatch.limiter.rounds import Measure


def measure(seconds: float) -> Measure:
    """A round of 32 requests at a limit of 32, each of which took so long."""
    return Measure(32, [(32.0, seconds)] * 32)


@pytest.fixture
def expected() -> Expected:
    return Expected(Noise())


def test_one_round_that_is_off_may_be_chance_and_the_second_one_in_a_row_is_not(expected: Expected) -> None:
    assert expected.moved_by(measure(1.0)) == 0.0
    assert expected.moved_by(measure(2.0)) == 0.0
    assert expected.moved_by(measure(1.0)) == 0.0
    assert expected.moved_by(measure(2.0)) == 0.0
    assert expected.moved_by(measure(2.0)) < -0.3, "half of the throughput in two rounds in a row"


def test_more_throughput_is_a_change_too(expected: Expected) -> None:
    expected.moved_by(measure(1.0))
    expected.moved_by(measure(0.5))
    assert expected.moved_by(measure(0.5)) > 0.3


def test_a_slow_drift_is_followed(expected: Expected) -> None:
    """Four times the throughput after 70 rounds, each of which has 2 % more than the one before."""
    assert [expected.moved_by(measure(0.98**number)) for number in range(70)] == [0.0] * 70


def test_rounds_that_differ_at_the_same_limit_must_be_further_off() -> None:
    """An engine whose rounds always go up and down by a half has not changed when one is slow."""
    expected = Expected(Noise())
    for number in range(20):
        expected.moved_by(measure((1.0, 1.5)[number % 2]))
    assert [expected.moved_by(measure(2.0)) for _ in range(2)] == [0.0, 0.0]


def test_a_new_limit_is_compared_with_nothing_before_it(expected: Expected) -> None:
    expected.moved_by(measure(1.0))
    expected.moved_by(measure(2.0))
    expected.forget()
    assert [expected.moved_by(measure(2.0)) for _ in range(3)] == [0.0] * 3
