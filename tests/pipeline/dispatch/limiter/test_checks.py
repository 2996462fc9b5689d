"""Headers that say that nothing is left, although the upstream accepts more."""

from math import inf

import pytest

from batchline.pipeline.dispatch.limiter.announced import Announced
from tests.support.announcements import announce, answer_to, left


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
        self.announced.on_check_answered(self.now)

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
    checked.announced.on_check_answered(checked.now)
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
