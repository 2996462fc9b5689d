"""How much rounds at the same limit differ, and what that says of the error of a rate (D9)."""

from math import exp

import pytest

from batchline.pipeline.dispatch.limiter.noise import Noise
from batchline.pipeline.dispatch.limiter.rounds import Measure


def measure(*latencies: float) -> Measure:
    return Measure(32, [(32.0, latency) for latency in latencies])


def test_the_error_is_that_of_the_round_until_rounds_differ_by_more() -> None:
    noise, uneven, even = Noise(), measure(0.5, 1.5), measure(1.0, 1.0)
    assert (noise.error(uneven), noise.error(even)) == (uneven.error, 0.0)
    noise.add(even, measure(exp(0.1)))
    assert noise.error(uneven) == uneven.error
    assert noise.error(even) == pytest.approx(0.1 / 2**0.5)


def test_an_upstream_that_changed_once_is_soon_measured_as_well_as_before() -> None:
    """A server of four times the speed is another one, and its limit must be found."""
    noise = Noise()
    noise.add(measure(1.0), measure(0.25))
    for _ in range(24):
        noise.add(measure(0.25), measure(0.25))
    assert noise.error(measure(0.25)) < 0.04
