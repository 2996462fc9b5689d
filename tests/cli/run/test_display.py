"""The progress that `batchline run` shows (F4)."""

from io import StringIO

import pytest

from batchline.cli.run.display import PlainLines, ProgressRate, TerminalLine, can_redraw
from batchline.client.models import Counts


class Watch:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_rate_is_that_of_the_last_seconds() -> None:
    rate = ProgressRate()
    assert rate.seconds_for(10) is None
    for second in range(31):
        rate.record(min(second, 15) * 100, at=float(second))
        if second == 10:
            assert rate.per_second == pytest.approx(100)
            assert rate.seconds_for(500) == pytest.approx(5)
    assert rate.per_second == 0
    assert rate.seconds_for(10) is None


def test_a_log_gets_a_line_per_tenth_or_per_30_seconds() -> None:
    """F4: a thousand polls make a few lines, and a batch that makes no progress makes some too."""
    written, watch = StringIO(), Watch()
    display = PlainLines(written, steady=watch)
    for done in range(1001):
        watch.now += 0.01
        display.lines(Counts(total=1000, completed=done))
    assert len(written.getvalue().splitlines()) == 10
    for _ in range(10):
        watch.now += 10
        display.lines(Counts(total=2000, completed=1000), problem=f"paused at {watch.now}")
    assert 3 <= len(written.getvalue().splitlines()) - 10 <= 4
    assert "paused at" in written.getvalue()


def test_a_terminals_line_stays_one_line_whatever_a_server_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """F4: text from a server cannot control the terminal, and is cut before it would wrap."""
    monkeypatch.setenv("COLUMNS", "60")
    written, watch = StringIO(), Watch()
    display = TerminalLine(written, steady=watch)
    display.lines(Counts(total=4, completed=1, failed=1))
    display.retrying("\x1b[2Jgone\n" * 20)
    display.retrying("away")
    drawn = written.getvalue().split("\r\x1b[K")[1:]
    assert drawn[0] == "############............  2/4 lines  50 %  1 failed"
    assert "\n" not in written.getvalue()
    assert "\x1b" not in drawn[1]
    assert len(drawn[1]) == 59
    assert drawn[2].endswith("1 failed  (away;")


def test_a_log_is_told_of_trouble_at_once_and_of_the_same_trouble_no_more_often() -> None:
    """F4: without a terminal nobody should wait 30 s to learn that nothing moves."""
    written, watch = StringIO(), Watch()
    display = PlainLines(written, steady=watch)
    for second in range(10):
        watch.now += 1
        problem = None if second < 3 else f"waiting: the upstream accepts {second} lines a second"
        display.lines(Counts(total=1000, completed=0), problem=problem)
    assert written.getvalue() == "0/1,000 lines, 0 %, waiting: the upstream accepts 3 lines a second\n"
    display.lines(Counts(total=1000, completed=0), problem="waiting: the upstream is paused")
    assert written.getvalue().endswith("paused\n")


def test_no_end_is_estimated_while_paused() -> None:
    written, watch = StringIO(), Watch()
    display = TerminalLine(written, steady=watch)
    for done in range(5):
        watch.now += 1
        display.lines(Counts(total=10, completed=done))
    assert "left" in written.getvalue()
    written.truncate(0)
    display.lines(Counts(total=10, completed=5), problem="the upstream is paused", paused=True)
    assert "left" not in written.getvalue()
    assert "lines/s" not in written.getvalue()


def test_one_line_is_singular() -> None:
    written = StringIO()
    PlainLines(written, steady=Watch()).lines(Counts(total=1, completed=1))
    assert written.getvalue() == "1/1 line, 100 %\n"


def test_a_dumb_terminal_is_not_redrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "dumb")
    assert not can_redraw(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert can_redraw(Terminal())
    assert not can_redraw(StringIO())
