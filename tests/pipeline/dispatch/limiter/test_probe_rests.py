"""How long a limit is held before more is probed."""

import pytest

from batchline.pipeline.dispatch.limiter.probe_rests import ProbeRests

RATE = 100.0


def block(rests: ProbeRests, began_at: float, ended_at: float, *, raised: bool = True) -> None:
    rests.on_block_over(began_at, ended_at, raised=raised, rate=RATE)


def test_probes_follow_each_other_within_seconds_while_they_cost_little() -> None:
    rests = ProbeRests()
    for _ in range(10):
        rests.on_failed(0.1, tried_even=False)
        rests.begin(50.0, is_even=False)
        assert 50.75 <= rests.next_at <= 51.25
    assert not rests.are_long(50.0)


def test_probes_of_evenly_spaced_starts_become_rarer_while_they_are_refused() -> None:
    rests = ProbeRests()
    for _ in range(5):
        rests.on_failed(0.5, tried_even=False)
    rests.begin(0.0, is_even=True)
    assert 3.0 <= rests.next_at <= 5.0
    rests.on_accepted()
    rests.begin(0.0, is_even=True)
    assert rests.next_at <= 1.25


def test_a_probe_that_led_to_a_block_is_followed_by_a_longer_rest_each_time() -> None:
    rests = ProbeRests()
    block(rests, 10.0, 15.0)
    assert (rests.next_at, rests.were_blocked) == (25.0, True)
    assert [rests.are_long(now) for now in (24.9, 25.0)] == [True, False]
    block(rests, 25.0, 30.0)
    assert rests.next_at == 50.0
    rests.begin(31.0, is_even=False)
    assert rests.next_at == 50.0


def test_no_rest_is_longer_than_two_minutes() -> None:
    rests = ProbeRests()
    block(rests, 0.0, 600.0)
    assert rests.next_at == 720.0


@pytest.mark.parametrize(("answers", "is_long"), [(499, True), (501, False)])
def test_a_block_costs_nothing_if_as_much_was_answered_as_without_it(answers: int, is_long: bool) -> None:
    """An upstream that accepts 500 in each 5 s accepts no more if they come more slowly."""
    rests = ProbeRests()
    block(rests, 0.0, 5.0)
    rests.on_answers(answers)
    block(rests, 6.0, 10.0)
    assert rests.are_long(10.1) is is_long


def test_a_block_without_a_probe_ends_the_long_rests() -> None:
    rests = ProbeRests()
    block(rests, 0.0, 5.0)
    block(rests, 6.0, 11.0, raised=False)
    assert (rests.are_long(11.0), rests.were_blocked, rests.next_at) == (False, False, 11.0)


def test_evenly_spaced_starts_are_tried_more_and_more_seldom() -> None:
    rests, tried_at = ProbeRests(), list[int]()
    for number in range(1, 160):
        tries_even = rests.is_even_probe_due
        rests.on_failed(0.3, tried_even=tries_even)
        if tries_even:
            tried_at.append(number)
    assert tried_at == [3, 20, 149]
