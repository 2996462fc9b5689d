"""The requests in flight, and those that hang among them."""

import pytest

from batchline.pipeline.dispatch.limiter.load import Load, LoadGroup

LIMIT = 4
MANY = 100
"""More answers than it takes for a request to be slow at this limit."""


def start(load: Load, count: int = 1) -> LoadGroup:
    return load.start(count, limit=LIMIT)


def answer_others(load: Load, count: int) -> None:
    for _ in range(count):
        load.end([start(load)], answered=1)


def test_a_request_counts_until_it_ends() -> None:
    load = Load()
    first, second = start(load), start(load, 3)
    assert load.in_flight == 4
    load.end([second, first, second], answered=0)
    assert load.in_flight == 1


@pytest.mark.rule("D9", "Requests that hang take no slot of the others: they count for the cap alone.")
def test_a_request_that_outlasts_ten_rounds_of_others_is_counted_apart() -> None:
    load = Load()
    hanging = start(load)
    answer_others(load, 10 * LIMIT)
    assert (load.in_flight, load.slow) == (1, 0)
    answer_others(load, 2)
    assert (load.in_flight, load.slow) == (0, 1)
    load.end([hanging], answered=0)
    assert (load.in_flight, load.slow) == (0, 0)


def test_of_requests_that_started_together_only_those_in_flight_become_slow() -> None:
    load = Load()
    hanging = start(load, 3)
    load.end([hanging], answered=1)
    answer_others(load, MANY)
    assert (load.in_flight, load.slow) == (0, 2)
    load.end([hanging], answered=1)
    assert (load.in_flight, load.slow) == (0, 1)


def test_while_nothing_is_answered_nothing_is_slow() -> None:
    """An upstream that stalls has as much to do as before."""
    load = Load()
    starts = [start(load) for _ in range(3)]
    for each in starts[:2]:
        load.end([each], answered=0)
    assert (load.in_flight, load.slow) == (1, 0)


def test_requests_end_in_any_order() -> None:
    load = Load()
    starts = [start(load) for _ in range(5)]
    answer_others(load, MANY)
    assert (load.in_flight, load.slow) == (0, 5)
    for each in (starts[3], starts[0], starts[4], starts[1], starts[2]):
        load.end([each], answered=0)
    assert (load.in_flight, load.slow) == (0, 0)
