"""Refusals that are about single lines, and those that are about a limit."""

import pytest

from batchline.pipeline.dispatch.limiter.line_refusals import LineRefusals
from tests.support.starts import start_of

LATENCY_SECONDS = 0.1
STEP_SECONDS = 0.01


class Drive:
    """Reports answers and refusals of one model, shortly after each other."""

    def __init__(self) -> None:
        self.refusals, self.now = LineRefusals(), 0.0
        self._order = 0

    def answer(self, times: int = 1, *, again: bool = False, order: int | None = None) -> None:
        for _ in range(times):
            self.now += STEP_SECONDS
            self._order += 1
            start = start_of("m", self.now - LATENCY_SECONDS, in_flight=1, order=order or self._order)
            self.refusals.on_answers([start], self.now, again=again)

    def refuse(self, line: object, *, again: bool = False, limited: bool = False, order: int | None = None) -> bool:
        """Return whether it is about the line. ``order`` is that of its start, if it is not the last one."""
        self.now += STEP_SECONDS
        self._order += 1
        return self.refusals.count_refusal(line, self.now, order=order or self._order, again=again, limited=limited)

    def refuse_first(self, seconds: float) -> None:
        """Refuse lines when they are tried first, and answer each of them when it is tried again."""
        end = self.now + seconds
        while self.now < end:
            self.refuse(object())
            self.answer(again=True)


def test_the_refusal_of_a_single_line_is_about_it() -> None:
    drive = Drive()
    drive.answer(10)
    assert drive.refuse("a")
    drive.answer(10)
    assert drive.refuse("a", again=True)


def test_the_refusal_of_a_single_line_is_not_about_it_if_a_limit_is_known() -> None:
    """A limit that is all but kept refuses one now and then."""
    drive = Drive()
    drive.answer(10)
    assert not drive.refuse("a", limited=True)


def test_two_lines_that_are_refused_together_are_not_refused_for_what_they_contain() -> None:
    drive = Drive()
    assert drive.refuse("a")
    assert not drive.refuse("b")


def test_two_lines_that_are_refused_one_long_after_the_other_are_about_themselves() -> None:
    drive = Drive()
    drive.refuse("a")
    drive.now += 1.0
    assert drive.refuse("b")


@pytest.mark.rule("D9", "Lines that never pass are distinguished from a limit, if other lines pass.")
def test_lines_that_never_pass_are_about_themselves_while_others_pass() -> None:
    drive = Drive()
    verdicts = []
    for _ in range(10):
        for line in "abc":
            drive.answer(3)
            verdicts.append(drive.refuse(line, again=True))
    assert not all(verdicts[1:10])
    assert all(verdicts[20:])


def test_lines_that_never_pass_are_about_themselves_if_they_are_refused_in_a_row() -> None:
    """Refusals come sooner than answers, so many lines that are tried again are refused before another passes."""
    drive = Drive()
    verdicts = []
    for _ in range(4):
        drive.answer(12)
        verdicts += [drive.refuse(line, again=True) for line in "abcdef"]
    assert all(verdicts[18:])


def test_lines_that_never_pass_say_nothing_while_no_other_does() -> None:
    """It is an outage, or a window that is used up."""
    drive = Drive()
    drive.answer(5)
    verdicts = [drive.refuse(line, again=True) for _ in range(20) for line in "abc"]
    assert not any(verdicts[1:])


def test_lines_that_pass_now_and_then_are_refused_by_a_limit() -> None:
    drive = Drive()
    for _ in range(50):
        drive.answer(2)
        drive.answer(again=True)
        for line in "ab":
            drive.refuse(line, again=True)
    assert not drive.refuse("c", again=True)


@pytest.mark.rule(
    "D9", "If lines are refused when they are tried first, and pass when tried again, no limit is assumed."
)
def test_lines_that_are_always_refused_first_are_no_evidence() -> None:
    """As at a gateway that starts a machine for each of them."""
    drive = Drive()
    drive.refuse_first(2.0)
    assert drive.refusals.first_are_refused
    assert drive.refuse("a")
    assert drive.refuse("b")


@pytest.mark.rule("D9", "A few more tries that are needed do not make a limit of refusals of first tries.")
def test_lines_that_need_several_tries_are_counted_until_it_is_decided() -> None:
    """Of the first lines that are tried again, none may pass."""
    drive = Drive()
    for line in range(40):
        drive.refuse(line)
    for line in range(12):
        drive.refuse(line, again=True, order=2 * line)
    assert not drive.refusals.first_are_refused
    for line in range(6):
        drive.answer(again=True, order=2 * line + 1)
    assert drive.refusals.first_are_refused


@pytest.mark.rule("D9", "A window that retried lines use up is distinguished from lines that are refused at first.")
def test_lines_that_pass_one_after_the_other_until_none_does_are_refused_by_a_limit() -> None:
    """Lines that were refused before go first in each window, so those that are tried first find it used up."""
    drive = Drive()
    for window in range(20):
        drive.answer(20, again=True)
        for line in range(15):
            drive.refuse((window, line), again=True)
        for line in range(5):
            drive.refuse((window, line))
        drive.now += 0.5
    assert not drive.refusals.first_are_refused


def test_what_is_undecided_for_long_is_forgotten() -> None:
    """Otherwise the first answers after a window that was used up would seem to follow from another try."""
    drive = Drive()
    for line in range(40):
        drive.refuse(line)
        drive.refuse(line, again=True)
    drive.now += 3.0
    drive.refuse("a", again=True)
    drive.answer(20, again=True)
    assert not drive.refusals.first_are_refused


def test_first_tries_that_pass_end_it() -> None:
    drive = Drive()
    drive.refuse_first(2.0)
    for _ in range(100):
        drive.answer(3)
        drive.answer(again=True)
    assert not drive.refusals.first_are_refused


def test_first_tries_that_pass_sometimes_are_refused_by_a_limit() -> None:
    drive = Drive()
    for line in range(200):
        drive.refuse(line)
        drive.answer(again=True)
        if line % 8 == 0:
            drive.answer()
    assert not drive.refusals.first_are_refused
