"""Collects the results and writes them to disk after every run, so that an interruption loses nothing."""

import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import psutil  # type: ignore[import-untyped]
from msgspec import Struct
from msgspec.json import encode, format

from bench.figures import Table
from bench.promises import Promise, scoreboard
from bench.runs import Run


class PartResult(Struct, frozen=True, kw_only=True):
    """The result of one part of the benchmark."""

    figures: Any
    tables: list[Table]
    promises: list[Promise]


class Results:
    """A JSON document that is written again after every addition."""

    def __init__(self, path: Path, *, quick: bool) -> None:
        self._path, self._quick = path, quick
        self._began, self._part = monotonic(), ""
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._left_out: dict[str, str] = {}
        self._promises: list[Promise] = []
        self._figures: dict[str, Any] = {}
        self._runs: list[dict[str, Any]] = []
        self.upstream = ""

    def clock(self) -> str:
        """Return the minutes and seconds since the start."""
        return "{:02.0f}:{:02.0f}".format(*divmod(int(monotonic() - self._began), 60))

    def begin_part(self, name: str, *, place: int, of: int) -> None:
        self._part = name
        print_progress(f"{self.clock()} part {place} of {of}: {name}")

    def leave_out(self, what: str, reason: str) -> None:
        if what not in self._left_out:
            self._left_out[what] = reason
            print_progress(f"{what} is left out: {reason}")

    def add_run(self, run: Run, what: str) -> None:
        self._runs.append({"part": self._part, "what": what, "run": run})
        self.write(whole=False)

    def add_part(self, result: PartResult) -> None:
        self._figures[self._part] = result.figures
        self._promises += result.promises
        self.write(whole=False)

    def scoreboard(self) -> Table:
        title = "What is promised, and what was reached" + (
            "; a quick run, do not quote the figures" if self._quick else ""
        )
        return scoreboard(self._promises, title=title)

    def write(self, *, whole: bool) -> None:
        """Replace the document in one step, so that it can always be read. ``whole`` says that it is complete."""
        document = {
            "machine": _machine(),
            "started_at": self._started_at,
            "seconds": round(monotonic() - self._began, 1),
            "quick": self._quick,
            "whole": whole,
            "upstream": self.upstream,
            "left_out": self._left_out,
            "promises": [{"goal": each.goal, "kept": each.kept, "figure": each} for each in self._promises],
            "parts": self._figures,
            "runs": self._runs,
        }
        unfinished = self._path.with_name(self._path.name + ".new")
        unfinished.write_bytes(format(encode(document), indent=1))
        unfinished.replace(self._path)


def print_progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _machine() -> dict[str, object]:
    return {
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
    }
