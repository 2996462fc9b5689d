"""What a part of the run has to work with: the upstream, the backends, how much is to be done, folders of its own."""

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from bench.contestants import Run
from bench.services import Backend
from bench.upstream import Upstream


class Sizes(Struct, frozen=True, kw_only=True):
    rounds: int
    """Of what is told as a median."""
    batchline_lines: int
    script_lines: dict[str, int]
    wrk_seconds: int
    """Of wrk as a contestant."""
    sending_seconds: int
    """Of batchline beside wrk."""
    growth: dict[int, int]
    """How often a batchline gets how many lines."""
    finished_batches: int
    history_lines: int
    idle_seconds: float


FULL = Sizes(
    rounds=5,
    batchline_lines=50_000,
    script_lines={"AsyncOpenAI script": 2_000, "aiohttp script": 10_000},
    wrk_seconds=5,
    sending_seconds=20,
    growth={1_000: 5, 10_000: 5, 100_000: 3, 1_000_000: 1},
    finished_batches=10_000,
    history_lines=20_000,
    idle_seconds=10,
)
QUICK = Sizes(
    rounds=1,
    batchline_lines=2_000,
    script_lines={"AsyncOpenAI script": 200, "aiohttp script": 1_000},
    wrk_seconds=1,
    sending_seconds=3,
    growth={1_000: 1, 10_000: 1},
    finished_batches=1_000,
    history_lines=3_000,
    idle_seconds=3,
)


class Course:
    def __init__(self, folder: Path, upstream: Upstream, backends: Sequence[Backend], sizes: Sizes) -> None:
        self._folder = folder
        self.upstream = upstream
        self.backends = backends
        self.sizes = sizes
        self.left_out: dict[str, str] = {}

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A new one that goes with the block."""
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            yield Path(name)

    def leave_out(self, what: str, why: str) -> None:
        if what not in self.left_out:
            self.left_out[what] = why
            say(f"{what} is left out: {why}")


def note(run: Run, what: str) -> Run:
    """Tell of a run while others are still to come."""
    say(f"{what}: {run.contestant}, {run.lines:,} lines, {run.lines_per_second:,.0f}/s, {run.cpu_us:,.1f} us a line")
    return run


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
