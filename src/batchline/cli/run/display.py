"""Shows progress on stderr: one line that is redrawn on a terminal, else a plain line from time to time."""

import os
import re
import shutil
import sys
from collections import deque
from collections.abc import Callable
from typing import Protocol, TextIO

from batchline.cli.text import counted, format_count, format_duration, printable
from batchline.client.models import Counts

_BAR_WIDTH = 24
_REDRAW_SECONDS = 0.1
_PLAIN_LINE_SECONDS = 30.0
_RATE_WINDOW_SECONDS = 10.0
_DUMB_TERMINALS = frozenset({"dumb", "unknown"})
_CLEAR_LINE = "\r\x1b[K"

Steady = Callable[[], float]


class Display(Protocol):
    """Shows the progress of a run."""

    def stage(self, text: str, *, fraction: float | None = None) -> None:
        """Show the current step, and how much of it is done."""

    def lines(self, counts: Counts, *, problem: str | None = None, paused: bool = False) -> None:
        """Show how many lines are done, and why the others do not run. While paused, no remaining time is shown."""

    def retrying(self, reason: str) -> None:
        """Show that a request failed and will be repeated."""

    def clear(self) -> None:
        """Remove the progress line before other text is printed."""


def stderr_display(*, steady: Steady) -> Display:
    """Return the display that fits stderr."""
    return (TerminalLine if can_redraw(sys.stderr) else PlainLines)(sys.stderr, steady=steady)


def can_redraw(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can redraw a line."""
    return stream.isatty() and os.environ.get("TERM") not in _DUMB_TERMINALS


class TerminalLine:
    """One line that is redrawn in place."""

    def __init__(self, stream: TextIO, *, steady: Steady) -> None:
        self._stream, self._steady = stream, steady
        self._rate = ProgressRate()
        self._drawn, self._drawn_at = "", float("-inf")
        self._full, self._empty = ("█", "░") if "utf" in (stream.encoding or "").lower() else ("#", ".")

    def stage(self, text: str, *, fraction: float | None = None) -> None:
        if fraction is None:
            self._draw(text)
        elif self._steady() - self._drawn_at >= _REDRAW_SECONDS or fraction >= 1:
            self._draw(f"{self._bar(fraction)}  {text}")

    def lines(self, counts: Counts, *, problem: str | None = None, paused: bool = False) -> None:
        self._rate.record(counts.done, at=self._steady())
        parts = [self._bar(_fraction(counts)), *_facts(counts, None if paused else self._rate)]
        self._draw("  ".join([*parts, problem] if problem else parts))

    def retrying(self, reason: str) -> None:
        self._draw(f"{self._drawn.partition('  (')[0]}  ({reason}; trying again)")

    def clear(self) -> None:
        self._stream.write(_CLEAR_LINE)
        self._stream.flush()

    def _bar(self, fraction: float) -> str:
        full = int(fraction * _BAR_WIDTH)
        return self._full * full + self._empty * (_BAR_WIDTH - full)

    def _draw(self, text: str) -> None:
        self._drawn, self._drawn_at = printable(text), self._steady()
        # One column stays free: a terminal may begin a new line after it has written the last column.
        self._stream.write(_CLEAR_LINE + self._drawn[: shutil.get_terminal_size().columns - 1])
        self._stream.flush()


class PlainLines:
    """Lines for a log file: one per stage, per tenth of the batch or per 30 seconds, and each new problem at once."""

    def __init__(self, stream: TextIO, *, steady: Steady) -> None:
        self._stream, self._steady = stream, steady
        self._rate = ProgressRate()
        self._last_text = ""
        self._last_problem: str | None = None
        self._tenths, self._printed_at = 0, steady()

    def stage(self, text: str, *, fraction: float | None = None) -> None:
        self._print_once(text)

    def lines(self, counts: Counts, *, problem: str | None = None, paused: bool = False) -> None:
        now = self._steady()
        self._rate.record(counts.done, at=now)
        tenths = int(_fraction(counts) * 10)
        is_new_problem = problem is not None and _kind(problem) != self._last_problem
        if tenths == self._tenths and now - self._printed_at < _PLAIN_LINE_SECONDS and not is_new_problem:
            return
        self._tenths, self._printed_at = tenths, now
        self._last_problem = None if problem is None else _kind(problem)
        facts = [*_facts(counts, None if paused else self._rate), problem]
        self._print_once(", ".join(fact for fact in facts if fact))

    def retrying(self, reason: str) -> None:
        self._print_once(f"{reason}; trying again")

    def clear(self) -> None:
        pass

    def _print_once(self, text: str) -> None:
        if text != self._last_text:
            self._last_text = text
            self._stream.write(printable(text) + "\n")
            self._stream.flush()


class ProgressRate:
    """Lines per second over the last seconds, so that the figure follows what happens now."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def record(self, done: int, *, at: float) -> None:
        """Record how many lines were done at a time."""
        self._points.append((at, done))
        while len(self._points) > 2 and self._points[1][0] <= at - _RATE_WINDOW_SECONDS:
            self._points.popleft()

    @property
    def per_second(self) -> float:
        """The rate, 0 while it is unknown."""
        if len(self._points) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._points[0], self._points[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0

    def seconds_for(self, lines: int) -> float | None:
        """Return how long this many lines will take, or None while none are being done."""
        return lines / self.per_second if self.per_second > 0 else None


def _fraction(counts: Counts) -> float:
    return counts.done / counts.total if counts.total else 0.0


def _kind(problem: str) -> str:
    """Return a problem without its numbers, which may change at every look."""
    return re.sub(r"[\d.,:]+", "", problem)


def _facts(counts: Counts, rate: ProgressRate | None) -> list[str]:
    """Return the counts, and the rate and the time left if they are known."""
    facts = [f"{format_count(counts.done)}/{counted(counts.total, 'line')}", f"{int(_fraction(counts) * 100)} %"]
    if counts.failed:
        facts.append(f"{format_count(counts.failed)} failed")
    left = None if rate is None else rate.seconds_for(counts.total - counts.done)
    if rate is not None and left is not None:
        facts.append(f"{rate.per_second:.1f} lines/s")
    if left:
        facts.append(f"{format_duration(left)} left")
    return facts
