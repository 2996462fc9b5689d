"""The comparison with a running engine measures what it claims."""

import asyncio

from bench.engine import Load, Point, curve_of, direct_rate, rate_of, run_service, undisturbed
from tests.support.service import running_mock

LOAD = Load("m", "Say hello.", 8)


def test_a_direct_run_has_as_many_in_flight_as_it_says() -> None:
    with running_mock(delay=0.05) as mock:
        assert asyncio.run(direct_rate(mock.url, LOAD, in_flight=8, requests=80)) > 0
        stats = mock.stats()
    assert (stats["requests"], stats["peak_in_flight"]) == (80, 8)


def test_a_batch_is_run_by_a_service_of_its_own() -> None:
    with running_mock() as mock:
        points = run_service(mock.url, LOAD, "off", 320)
        assert mock.stats()["requests"] == points[-1].answered == 320


def test_a_rate_is_that_of_the_middle_of_a_batch() -> None:
    """From 25 to 85 % of its answers."""
    points = [Point(0.0, 0, None), Point(4.0, 30, 8), Point(5.0, 60, 8), Point(6.0, 90, 8)]
    assert rate_of([*points, Point(20.0, 100, 8)]) == 30.0


def test_the_curve_of_the_limit_has_each_change_once() -> None:
    points = [Point(0.0, 0, None), Point(1.0, 3, 8), Point(2.0, 6, 8), Point(3.0, 9, 32), Point(4.0, 9, 0)]
    assert curve_of(points) == "8 from 1 s, 32 from 3 s"


def test_a_run_is_repeated_if_the_host_took_cpu_time_away() -> None:
    """Otherwise the share of an engine would be that of a busy host."""
    rates = iter([1.0, 2.0, 3.0])
    seconds = iter([(0.0, 0.0), (9.0, 10.0), (9.0, 10.0), (9.2, 20.0)])
    assert undisturbed(lambda: next(rates), stolen_seconds=lambda: next(seconds)) == 2.0


def test_the_least_disturbed_run_counts_if_the_host_is_always_busy() -> None:
    rates = iter([1.0, 2.0, 3.0, 4.0])
    seconds = iter([(0.0, 0.0), (5.0, 10.0), (0.0, 0.0), (2.0, 10.0), (0.0, 0.0), (3.0, 10.0), (0.0, 0.0), (9.0, 10.0)])
    assert undisturbed(lambda: next(rates), stolen_seconds=lambda: next(seconds)) == 2.0
