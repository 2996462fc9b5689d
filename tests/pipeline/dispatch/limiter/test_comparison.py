"""Protects that refusals which no lower limit avoids are told from those that one does (D9)."""

import pytest

from batchline.pipeline.dispatch.limiter.comparison import Comparison


def compared(before: float, after: float, *, upwards: bool) -> bool:
    """Return whether the parts that were refused at two limits show that no lower limit is better."""
    comparison = Comparison()
    comparison.begin(upwards=upwards)
    comparison.go_on(before)
    assert not comparison.is_at_first_limit
    return comparison.shows_no_limit(after)


@pytest.mark.parametrize(("after", "shows"), [(0.3, True), (0.2, True), (0.14, False), (0.0, False)])
def test_downwards_the_same_part_must_be_refused(after: float, shows: bool) -> None:
    assert compared(0.3, after, upwards=False) is shows


def test_downwards_nothing_is_learned_if_nearly_all_are_refused() -> None:
    assert not compared(0.95, 0.95, upwards=False)


@pytest.mark.parametrize(("after", "shows"), [(0.2, True), (0.4, True), (0.45, False), (0.6, False)])
def test_upwards_about_half_of_the_added_requests_must_be_accepted(after: float, shows: bool) -> None:
    """At 100 and 200 in flight: 80 accepted, then 160, 120, 110 and 80."""
    assert compared(0.2, after, upwards=True) is shows


def test_the_limit_is_not_raised_if_most_are_refused() -> None:
    comparison = Comparison()
    comparison.begin(upwards=True)
    assert comparison.go_on(0.6) == pytest.approx(0.4)
    assert not comparison.is_upwards


def test_comparisons_upwards_become_rarer_while_they_show_a_limit() -> None:
    comparison, now, rests = Comparison(), 0.0, list[float]()
    for _ in range(6):
        comparison.rest(now)
        since = now
        while not comparison.may_go_upwards(0.3, now, seconds_per_start=0.01):
            now += 1.0
        rests.append(now - since)
    assert rests == [5.0, 10.0, 20.0, 40.0, 80.0, 80.0]


def test_there_is_no_comparison_upwards_where_starts_are_rare() -> None:
    comparison = Comparison()
    assert comparison.may_go_upwards(0.3, 0.0, seconds_per_start=0.15)
    assert not comparison.may_go_upwards(0.3, 0.0, seconds_per_start=0.2)


def test_the_lowest_limit_is_left_if_far_more_are_accepted_above_it() -> None:
    """What is refused there is refused for another reason."""
    comparison = Comparison()
    assert comparison.begin_from_lowest(0.8) == 16
    assert not comparison.is_at_first_limit
    assert comparison.least_starts == 32
    assert comparison.shows_no_limit(0.8)
    assert not comparison.shows_no_limit(31 / 32)


def test_the_lowest_limit_is_left_seldom_and_never_if_all_are_refused() -> None:
    comparison = Comparison()
    assert comparison.may_leave_lowest(0.8, 100.0)
    assert not comparison.may_leave_lowest(1.0, 100.0)
    comparison.begin_from_lowest(0.8)
    comparison.rest(100.0)
    assert not comparison.may_leave_lowest(0.8, 104.0)
    assert comparison.may_leave_lowest(0.8, 105.0)
