"""Progress on stderr: one line that is redrawn on a terminal, a plain line now and then anywhere else."""

import shutil
import sys
from collections.abc import Callable
from typing import Protocol, TextIO

from batchline.cli.run.pace import Pace
from batchline.cli.run.words import amount, duration, printable
from batchline.client.wire import Counts

_BAR_WIDTH = 24
_REDRAW_SECONDS = 0.1
_PLAIN_SECONDS = 30.0
_CLEAR_LINE = "\r\x1b[K"

Steady = Callable[[], float]


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
        self._pace = Pace()
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
        self._pace = Pace()
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


def _facts(counts: Counts, pace: Pace) -> list[str]:
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
