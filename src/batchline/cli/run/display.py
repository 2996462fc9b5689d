"""Progress on stderr: one line that is redrawn on a terminal, a plain line now and then anywhere else."""

import shutil
import sys
from collections import deque
from collections.abc import Callable
from typing import Protocol, TextIO

from batchline.client.models import Counts

_BAR_WIDTH = 24
_REDRAW_SECONDS = 0.1
_PLAIN_SECONDS = 30.0
_CLEAR_LINE = "\r\x1b[K"

Steady = Callable[[], float]


_WINDOW_SECONDS = 10.0


class ProgressRate:
    """Over the last seconds, so that what is told follows what happens."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def see(self, done: int, *, at: float) -> None:
        self._seen.append((at, done))
        while len(self._seen) > 2 and self._seen[1][0] <= at - _WINDOW_SECONDS:
            self._seen.popleft()

    @property
    def per_second(self) -> float:
        if len(self._seen) < 2:
            return 0.0
        (first_at, first), (last_at, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_at - first_at) if last_at > first_at else 0.0

    def seconds_for(self, lines: int) -> float | None:
        """None while nothing moves."""
        return lines / self.per_second if self.per_second > 0 else None


_WIDEST = 200


def amount(number: int) -> str:
    return f"{number:,}"


def duration(seconds: float) -> str:
    """``3.4 s`` while that says something, then ``5:07`` and ``1:05:07``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def printable(text: str) -> str:
    """What comes from a server or an input file must not steer the terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def shortened(text: str) -> str:
    shown = printable(text[:_WIDEST])
    return shown if len(text) <= _WIDEST else f"{shown}..."


class Display(Protocol):
    def stage(self, text: str, *, share: float | None = None) -> None:
        """What is being done, and how much of it is."""

    def lines(self, counts: Counts, *, trouble: str | None = None) -> None:
        """How many lines are done, and what holds up the others."""

    def waiting(self, reason: str) -> None:
        """A request did not succeed and will be repeated."""

    def clear(self) -> None:
        """Leave the place to what is said for good."""


def display_on(stream: TextIO, *, steady: Steady) -> Display:
    return TerminalLine(stream, steady=steady) if stream.isatty() else PlainLines(stream, steady=steady)


class TerminalLine:
    def __init__(self, stream: TextIO, *, steady: Steady) -> None:
        self._stream, self._steady = stream, steady
        self._pace = ProgressRate()
        self._drawn, self._drawn_at = "", float("-inf")
        self._full, self._empty = ("█", "░") if "utf" in (stream.encoding or "").lower() else ("#", ".")

    def stage(self, text: str, *, share: float | None = None) -> None:
        if share is None:
            self._draw(text)
        elif self._steady() - self._drawn_at >= _REDRAW_SECONDS or share >= 1:
            self._draw(f"{self._bar(share)}  {text}")

    def lines(self, counts: Counts, *, trouble: str | None = None) -> None:
        self._pace.see(counts.done, at=self._steady())
        parts = [self._bar(_share(counts)), *_facts(counts, self._pace)]
        self._draw("  ".join([*parts, trouble] if trouble else parts))

    def waiting(self, reason: str) -> None:
        self._draw(f"{self._drawn.partition('  (')[0]}  ({reason}; trying again)")

    def clear(self) -> None:
        self._stream.write(_CLEAR_LINE)
        self._stream.flush()

    def _bar(self, share: float) -> str:
        full = int(share * _BAR_WIDTH)
        return self._full * full + self._empty * (_BAR_WIDTH - full)

    def _draw(self, text: str) -> None:
        self._drawn, self._drawn_at = printable(text), self._steady()
        # One column is left free: a terminal that has written its last one may begin a new line.
        self._stream.write(_CLEAR_LINE + self._drawn[: shutil.get_terminal_size().columns - 1])
        self._stream.flush()


class PlainLines:
    def __init__(self, stream: TextIO, *, steady: Steady) -> None:
        self._stream, self._steady = stream, steady
        self._pace = ProgressRate()
        self._said = ""
        self._tenths, self._told_at = 0, steady()

    def stage(self, text: str, *, share: float | None = None) -> None:
        self._say_once(text)

    def lines(self, counts: Counts, *, trouble: str | None = None) -> None:
        now = self._steady()
        self._pace.see(counts.done, at=now)
        tenths = int(_share(counts) * 10)
        if tenths == self._tenths and now - self._told_at < _PLAIN_SECONDS:
            return
        self._tenths, self._told_at = tenths, now
        facts = [*_facts(counts, self._pace), trouble]
        self._say_once(", ".join(fact for fact in facts if fact))

    def waiting(self, reason: str) -> None:
        self._say_once(f"{reason}; trying again")

    def clear(self) -> None:
        pass

    def _say_once(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._stream.write(printable(text) + "\n")
            self._stream.flush()


def _share(counts: Counts) -> float:
    return counts.done / counts.total if counts.total else 0.0


def _facts(counts: Counts, pace: ProgressRate) -> list[str]:
    facts = [f"{amount(counts.done)}/{amount(counts.total)} lines", f"{int(_share(counts) * 100)} %"]
    if counts.failed:
        facts.append(f"{amount(counts.failed)} failed")
    left = pace.seconds_for(counts.total - counts.done)
    if left is not None:
        facts.append(f"{pace.per_second:.1f} lines/s")
    if left:
        facts.append(f"{duration(left)} left")
    return facts


def stderr_display(*, steady: Steady) -> Display:
    return display_on(sys.stderr, steady=steady)
