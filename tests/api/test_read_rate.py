"""A key that reads without a pause does not slow the others down: A4."""

from collections.abc import Callable

import pytest

from batchline.api.read_rate import ReadRate
from batchline.domain.errors import RateLimited
from tests.support.api_server import Api
from tests.support.clocks import SettableClock


@pytest.mark.rule("A4", "The reads per second of a key are bounded, and those of other keys are not affected.")
def test_a_key_that_reads_too_often_is_throttled_and_no_other(serve: Callable[..., Api]) -> None:
    api = serve(max_key_reads_per_second=0.5)
    other = api.new_account("other")
    assert api.call("GET", "/v1/files").status == 200
    refused = [api.call("GET", path) for path in ("/v1/files", "/v1/batches", "/v1/models")][-1]
    assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 3
    assert api.call("GET", "/v1/files", account=other).status == 200
    assert api.upload().status == 200
    sample = api.services.metrics.registry.get_sample_value
    assert (sample("batchline_refusals_total", {"bound": "key_reads"}) or 0) >= 1


def test_a_burst_is_allowed_and_then_the_rate() -> None:
    """A4"""
    clock = SettableClock()
    rate = ReadRate(10, clock=clock)
    for _ in range(20):
        rate.take("a")
    with pytest.raises(RateLimited):
        rate.take("a")
    rate.take("b")
    clock.advance(0.11)
    rate.take("a")
    with pytest.raises(RateLimited):
        rate.take("a")
    clock.advance(100)
    for _ in range(20):
        rate.take("a")


def test_keys_that_are_idle_are_forgotten() -> None:
    clock = SettableClock()
    rate = ReadRate(10, clock=clock)
    for n in range(30_000):
        rate.take(f"key-{n}")
        clock.advance(0.01)
    assert len(rate._full_at) <= 10_001
