"""Shows progress on stderr: one line that is redrawn on a terminal, else a plain line from time to time."""

import shutil
import sys
from collections import deque
from collections.abc import Callable
from typing import Protocol, TextIO

from batchline.cli.output import printable
from batchline.client.models import Counts

_BAR_WIDTH = 24
_REDRAW_SECONDS = 0.1
_PLAIN_LINE_SECONDS = 30.0
_RATE_WINDOW_SECONDS = 10.0
_MAX_TEXT_LENGTH = 200
_CLEAR_LINE = "\r\x1b[K"

Steady = Callable[[], float]


class Display(Protocol):
    """What a run shows while it works."""

    def stage(self, text: str, *, fraction: float | None = None) -> None:
        """Show the current step, and how much of it is done."""

    def lines(self, counts: Counts, *, problem: str | None = None) -> None:
        """Show how many lines are done, and what keeps the others from running."""

    def retrying(self, reason: str) -> None:
        """Show that a request failed and will be repeated."""

    def clear(self) -> None:
        """Remove the progress line before other text is printed."""


def stderr_display(*, steady: Steady) -> Display:
    """Return the display that fits stderr."""
    return (TerminalLine if sys.stderr.isatty() else PlainLines)(sys.stderr, steady=steady)


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

    def lines(self, counts: Counts, *, problem: str | None = None) -> None:
        self._rate.record(counts.done, at=self._steady())
        parts = [self._bar(_fraction(counts)), *_facts(counts, self._rate)]
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
    """Lines for a log file: one per stage, and one per tenth of the batch or per 30 seconds."""

    def __init__(self, stream: TextIO, *, steady: Steady) -> None:
        self._stream, self._steady = stream, steady
        self._rate = ProgressRate()
        self._last_text = ""
        self._tenths, self._printed_at = 0, steady()

    def stage(self, text: str, *, fraction: float | None = None) -> None:
        self._print_once(text)

    def lines(self, counts: Counts, *, problem: str | None = None) -> None:
        now = self._steady()
        self._rate.record(counts.done, at=now)
        tenths = int(_fraction(counts) * 10)
        if tenths == self._tenths and now - self._printed_at < _PLAIN_LINE_SECONDS:
            return
        self._tenths, self._printed_at = tenths, now
        facts = [*_facts(counts, self._rate), problem]
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


def format_count(number: int) -> str:
    """Return a number with separators between thousands."""
    return f"{number:,}"


def format_duration(seconds: float) -> str:
    """Return ``3.4 s`` below ten seconds, then ``5:07`` and ``1:05:07``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def shortened(text: str) -> str:
    """Return the beginning of a text, with what is not printable escaped."""
    shown = printable(text[:_MAX_TEXT_LENGTH])
    return shown if len(text) <= _MAX_TEXT_LENGTH else f"{shown}..."


def _fraction(counts: Counts) -> float:
    return counts.done / counts.total if counts.total else 0.0


def _facts(counts: Counts, rate: ProgressRate) -> list[str]:
    facts = [f"{format_count(counts.done)}/{format_count(counts.total)} lines", f"{int(_fraction(counts) * 100)} %"]
    if counts.failed:
        facts.append(f"{format_count(counts.failed)} failed")
    left = rate.seconds_for(counts.total - counts.done)
    if left is not None:
        facts.append(f"{rate.per_second:.1f} lines/s")
    if left:
        facts.append(f"{format_duration(left)} left")
    return facts
