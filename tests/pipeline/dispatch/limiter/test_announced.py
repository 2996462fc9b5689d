"""Limits that an upstream announces in the headers of its answers."""

from math import inf

import pytest

from batchline.domain.rate_limits import Quota
from batchline.pipeline.dispatch.limiter.announced import Announced
from tests.support.announcements import announce, left


def test_without_an_announcement_nothing_is_held_back() -> None:
    announced = Announced()
    assert not announced.is_limiting
    assert (announced.allowance(1.0), announced.wait(1.0)) == (inf, 0.0)


@pytest.mark.rule("D9", "What an upstream announces as left in a window is used, and no more until its reset.")
def test_a_window_is_used_up_and_waited_for() -> None:
    announced = Announced()
    announce(announced, order=1, now=1.0, requests=left(99, 10.0))
    announce(announced, order=81, now=1.1, requests=left(19, 9.9))
    assert announced.allowance(1.1) == 19
    announced.on_start(19, 1.1)
    assert announced.allowance(2.0) == 0
    assert announced.wait(2.0) == pytest.approx(9.0)
    assert announced.allowance(10.9) == 0


@pytest.mark.rule("D9", "After an announced reset nothing is known, and nothing is held back.")
def test_after_the_reset_nothing_is_known() -> None:
    announced = Announced()
    announce(announced, order=1, now=1.0, requests=left(0, 10.0))
    assert announced.is_limiting
    assert announced.allowance(11.01) == inf
    assert not announced.is_limiting
    assert announced.wait(11.01) == 0.0


@pytest.mark.rule("D9", "What an upstream announces of a bucket is used as fast as the bucket fills.")
def test_a_bucket_is_used_as_fast_as_it_fills() -> None:
    """100 fit into it, and 10 come in a second: with 20 left it will be full in 8 s."""
    announced = Announced()
    announce(announced, order=1, now=1.0, requests=left(90, 1.0))
    announce(announced, order=2, now=5.0, requests=left(20, 8.0))
    announced.on_start(20, 5.0)
    assert announced.allowance(5.0) == 0
    assert announced.wait(5.0) == pytest.approx(0.1)
    assert announced.allowance(6.0) == pytest.approx(10.0)


def test_requests_that_were_started_after_the_answered_one_are_counted() -> None:
    """The upstream did not know them when it said what is left."""
    announced = Announced()
    announce(announced, order=5, started=25, now=1.0, requests=left(30, 10.0, limit=None))
    assert announced.allowance(1.0) == 10


def test_an_answer_to_an_older_request_changes_nothing() -> None:
    announced = Announced()
    announce(announced, order=9, now=1.0, requests=left(5, 10.0, limit=None))
    announce(announced, order=3, started=9, now=1.1, requests=left(11, 9.9, limit=None))
    assert announced.allowance(1.2) == 5


def test_the_tokens_of_a_request_are_learned() -> None:
    """With 100 for each, 1,000 tokens are enough for 10 requests."""
    announced = Announced()
    for order in range(1, 31):
        announce(announced, order=order, now=0.1 * order, tokens=left(4000 - 100 * order, 60.0 - 0.1 * order))
    assert announced.allowance(3.0) == pytest.approx(10.0)


def test_before_the_cost_is_known_tokens_hold_nothing_back() -> None:
    announced = Announced()
    announce(announced, order=1, now=1.0, tokens=left(500, 60.0))
    assert announced.allowance(1.0) == inf


def test_the_tighter_of_two_limits_counts() -> None:
    announced = Announced()
    announce(announced, order=1, now=1.0, requests=left(50, 10.0, limit=None), tokens=left(1100, 30.0, limit=None))
    announce(announced, order=2, now=1.0, requests=left(49, 10.0, limit=None), tokens=left(1000, 30.0, limit=None))
    assert announced.allowance(1.0) == 10
    announced.on_start(10, 1.0)
    assert announced.wait(1.0) == pytest.approx(30.0)


def test_a_limit_per_day_is_asked_again_after_five_minutes() -> None:
    """D3: as long as a Retry-After may hold up a line."""
    announced = Announced()
    announce(announced, order=1, now=1.0, requests=left(0, 86_400.0))
    assert announced.announced_wait(1.0) == pytest.approx(300.0)
    assert announced.allowance(301.5) == inf


@pytest.mark.parametrize("quota", [Quota(limit=100.0), Quota(reset_seconds=5.0), Quota()])
def test_an_announcement_without_what_is_left_says_nothing(quota: Quota) -> None:
    announced = Announced()
    announce(announced, order=1, now=1.0, requests=quota, tokens=quota)
    assert announced.allowance(1.0) == inf
    assert not announced.is_limiting


@pytest.mark.rule("D9", "Limits in headers that contradict each other, as those of several servers do, are ignored.")
def test_what_several_servers_announce_is_ignored_for_minutes() -> None:
    announced = Announced()
    for order in range(1, 10):
        remaining = 2.0 if order % 2 else 90.0
        announce(announced, order=order, now=0.1 * order, requests=left(remaining, 60.0))
    assert announced.allowance(1.0) == inf
    announce(announced, order=10, now=2.0, requests=left(0, 60.0))
    assert announced.allowance(2.0) == inf
    announce(announced, order=11, now=302.0, requests=left(0, 60.0))
    assert announced.allowance(302.0) == 0
