"""The requests in flight, and those that hang among them."""

import pytest

from batchline.pipeline.dispatch.limiter.load import Load, Start

LIMIT = 4
MANY = 100
"""More answers than it takes for a request to be slow at this limit."""


def start(load: Load, *, model: str = "m", limit: int = LIMIT) -> Start:
    return load.start(model, 0.0, order=1, limit=limit)


def answer_others(load: Load, count: int) -> None:
    for _ in range(count):
        load.on_answer()
        load.end(start(load))


def test_a_request_counts_itself_and_those_of_its_model_beside_it() -> None:
    load = Load()
    first, other, second = start(load), start(load, model="other"), start(load)
    assert [(each.in_flight, each.model_in_flight) for each in (first, other, second)] == [(1, 1), (2, 1), (3, 2)]
    load.end(first)
    assert (load.in_flight, load.by_model) == (2, {"other": 1, "m": 1})


def test_a_model_without_requests_is_forgotten() -> None:
    """A file may name any number of models."""
    load = Load()
    load.end(start(load, model="once"))
    assert "once" not in load.by_model


@pytest.mark.rule("D9", "Requests that hang take no slot of the others: they count for the cap alone.")
def test_a_request_that_outlasts_ten_rounds_of_others_is_counted_apart() -> None:
    load = Load()
    hanging = start(load)
    answer_others(load, 10 * LIMIT)
    assert (load.in_flight, load.slow) == (1, 0)
    answer_others(load, 2)
    assert (load.in_flight, load.slow) == (0, 1)
    assert load.by_model["m"] == 1
    load.end(hanging)
    assert (load.in_flight, load.slow, load.by_model["m"]) == (0, 0, 0)


def test_while_nothing_is_answered_nothing_is_slow() -> None:
    """An upstream that stalls has as much to do as before."""
    load = Load()
    starts = [start(load) for _ in range(3)]
    for each in starts[:2]:
        load.end(each)
    assert (load.in_flight, load.slow) == (1, 0)


def test_requests_end_in_any_order() -> None:
    load = Load()
    starts = [start(load) for _ in range(5)]
    answer_others(load, MANY)
    assert (load.in_flight, load.slow) == (0, 5)
    for each in (starts[3], starts[0], starts[4], starts[1], starts[2]):
        load.end(each)
    assert (load.in_flight, load.slow, load.by_model.total()) == (0, 0, 0)
