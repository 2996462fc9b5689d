"""What was measured, on the disk as soon as it is known: a break late in the hour loses nothing."""

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

from bench.contestants import Run
from bench.figures import Table
from bench.promises import Promise, scoreboard


class Told(Struct, frozen=True, kw_only=True):
    """What a part of the run came to."""

    figures: Any
    tables: list[Table]
    promises: list[Promise]


class Results:
    """A JSON document that is written anew with everything that is added."""

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
        """Minutes and seconds since the start."""
        return "{:02.0f}:{:02.0f}".format(*divmod(int(monotonic() - self._began), 60))

    def begin_part(self, name: str, *, place: int, of: int) -> None:
        self._part = name
        say(f"{self.clock()} part {place} of {of}: {name}")

    def leave_out(self, what: str, why: str) -> None:
        if what not in self._left_out:
            self._left_out[what] = why
            say(f"{what} is left out: {why}")

    def add_run(self, run: Run, what: str) -> None:
        self._runs.append({"part": self._part, "what": what, "run": run})
        self.write(whole=False)

    def add_part(self, told: Told) -> None:
        self._figures[self._part] = told.figures
        self._promises += told.promises
        self.write(whole=False)

    def scoreboard(self) -> Table:
        title = "What is promised, and what was reached" + ("; quick, so not to be quoted" if self._quick else "")
        return scoreboard(self._promises, title=title)

    def write(self, *, whole: bool) -> None:
        """In one step, so that there is always one that can be read. ``whole`` says that nothing is to come."""
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


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _machine() -> dict[str, object]:
    return {
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
    }
