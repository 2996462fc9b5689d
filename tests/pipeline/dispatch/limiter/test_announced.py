"""Limits that an upstream announces in the headers of its answers."""

from math import inf

import pytest

from batchline.domain.rate_limits import Quota, RateLimits
from batchline.pipeline.dispatch.limiter.announced import Announced
from batchline.pipeline.dispatch.limiter.load import Start


def answer_to(order: int, *, is_check: bool = False) -> Start:
    """Return the so-many-th request of the model."""
    return Start(0.0, "m", 1, 1, order, 1, is_check=is_check)


def announce(
    announced: Announced,
    *,
    order: int,
    now: float,
    requests: Quota | None = None,
    tokens: Quota | None = None,
    started: int | None = None,
) -> None:
    announced.on_announcement(
        RateLimits(requests=requests, tokens=tokens),
        answer_to(order),
        started=order if started is None else started,
        now=now,
    )


def left(remaining: float, reset_seconds: float, *, limit: float | None = 100.0) -> Quota:
    return Quota(limit=limit, remaining=remaining, reset_seconds=reset_seconds)


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


class Checked:
    """An upstream whose headers say that nothing is left for a minute, and say so again after that minute."""

    def __init__(self) -> None:
        self.announced, self.order, self.now = Announced(), 1, 0.0
        self.say()
        self.now = 60.1
        self.say()

    def say(self) -> None:
        announce(self.announced, order=self.order, now=self.now, requests=left(0, 60.0, limit=None))

    def next_check(self) -> float:
        """Start the next check, and return the seconds until then."""
        wait = self.announced.wait(self.now)
        assert wait > 0
        assert self.announced.allowance(self.now + 0.99 * wait) < 1
        self.now, self.order = self.now + wait, self.order + 1
        assert self.announced.allowance(self.now) == 1
        assert self.announced.on_start(1, self.now)
        assert self.announced.allowance(self.now) < 1
        return wait

    def accept(self) -> None:
        self.now += 0.1
        self.say()
        self.announced.on_answer(answer_to(self.order, is_check=True), self.now)

    def refuse(self) -> None:
        self.say()
        self.announced.on_refusal(answer_to(self.order, is_check=True), self.now)


@pytest.mark.rule("D9", "An upstream that says that it accepts nothing, and accepts all, is not believed for long.")
def test_headers_that_are_always_false_are_disbelieved_after_a_few_checks() -> None:
    checked = Checked()
    for _ in range(4):
        checked.next_check()
        checked.accept()
    assert checked.now < 65.1
    checked.say()
    assert not checked.announced.is_limiting
    assert (checked.announced.allowance(checked.now), checked.announced.wait(checked.now)) == (inf, 0.0)


def test_disbelieved_headers_are_checked_once_after_five_minutes() -> None:
    checked = Checked()
    for _ in range(4):
        checked.next_check()
        checked.accept()
    checked.announced.on_refusal(answer_to(1), checked.now)
    checked.now += 300.0
    checked.say()
    assert checked.announced.is_limiting
    checked.next_check()
    checked.accept()
    assert not checked.announced.is_limiting


@pytest.mark.rule("D9", "The true limits of an upstream are seldom checked.")
def test_checks_are_rare_once_they_are_refused() -> None:
    checked, waits = Checked(), []
    for _ in range(8):
        waits.append(checked.next_check())
        checked.refuse()
    assert waits == pytest.approx([1, 2, 4, 8, 15, 15, 15, 15])
    assert checked.announced.announced_wait(checked.now) == pytest.approx(60.0)


def test_a_refusal_shows_that_headers_may_be_true() -> None:
    checked = Checked()
    for _ in range(3):
        for _ in range(3):
            checked.next_check()
            checked.accept()
        checked.announced.on_refusal(answer_to(1), checked.now)
    assert checked.announced.is_limiting


def test_headers_that_show_that_something_is_left_are_believed_again() -> None:
    checked = Checked()
    checked.next_check()
    announce(checked.announced, order=checked.order, now=checked.now, requests=left(5, 60.0, limit=None))
    checked.announced.on_answer(answer_to(checked.order, is_check=True), checked.now)
    assert checked.announced.allowance(checked.now) == 5
    checked.say()
    assert checked.announced.wait(checked.now) == pytest.approx(60.0)


@pytest.mark.rule("D9", "An upstream is not asked before the reset that it announced, unless that is minutes away.")
@pytest.mark.parametrize("was_left", [False, True])
@pytest.mark.parametrize(("reset", "wait"), [(0.5, 0.5), (10.0, 10.0), (60.0, 60.0), (300.0, 60.0)])
def test_an_announced_reset_is_waited_for(was_left: bool, reset: float, wait: float) -> None:
    announced = Announced()
    if was_left:
        announce(announced, order=1, now=0.0, requests=left(5, 60.0, limit=None))
    announce(announced, order=2, now=1.0, requests=left(0, reset, limit=None))
    assert announced.wait(1.0) == pytest.approx(wait)
    assert announced.allowance(1.0 + 0.99 * wait) < 1


def test_a_short_window_in_which_nothing_was_ever_left_is_checked_at_half_of_its_time() -> None:
    announced = Announced()
    announce(announced, order=1, now=1.0, requests=left(0, 0.5, limit=None))
    announce(announced, order=2, now=1.6, requests=left(0, 0.5, limit=None))
    assert announced.wait(1.6) == pytest.approx(0.25)


def test_nothing_is_checked_while_something_is_left() -> None:
    """Requests in flight may use it up. Their answers will say what is left."""
    announced = Announced()
    announce(announced, order=1, started=11, now=1.0, requests=left(10, 60.0, limit=None))
    assert announced.allowance(30.0) == 0
    assert announced.wait(30.0) == pytest.approx(31.0)
