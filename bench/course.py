"""What a part of the run has to work with: the upstream, the backends, how much is to be done, folders of its own."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from bench.contestants import Run
from bench.results import Results, say
from bench.services import Backend
from bench.upstream import Upstream


class Sizes(Struct, frozen=True, kw_only=True):
    rounds: int
    """Of what is promised as a median."""
    waiting_rounds: int
    """Of what is told beside it, with an upstream that takes its time."""
    batchline_lines: int
    script_lines: dict[str, int]
    wrk_seconds: int
    """Of wrk as a contestant."""
    sending_seconds: int
    """Of batchline beside wrk."""
    sending_rounds: int
    long_line_bytes: int
    polls: int
    """At least so many."""
    growth: dict[int, int]
    """How often a batchline gets how many lines."""
    finished_batches: int
    history_lines: int
    idle_seconds: float


FULL = Sizes(
    rounds=5,
    waiting_rounds=3,
    batchline_lines=50_000,
    script_lines={"AsyncOpenAI script": 2_000, "aiohttp script": 10_000},
    wrk_seconds=5,
    sending_seconds=20,
    sending_rounds=2,
    long_line_bytes=2_048,
    polls=200,
    growth={1_000: 5, 10_000: 5, 100_000: 3, 1_000_000: 2},
    finished_batches=10_000,
    history_lines=50_000,
    idle_seconds=5,
)
QUICK = Sizes(
    rounds=1,
    waiting_rounds=1,
    batchline_lines=3_000,
    script_lines={"AsyncOpenAI script": 200, "aiohttp script": 1_000},
    wrk_seconds=1,
    sending_seconds=3,
    sending_rounds=1,
    long_line_bytes=2_048,
    polls=10,
    growth={1_000: 1, 10_000: 1, 30_000: 1},
    finished_batches=500,
    history_lines=3_000,
    idle_seconds=1,
)


class Course:
    def __init__(
        self, folder: Path, upstream: Upstream, backends: Sequence[Backend], sizes: Sizes, results: Results
    ) -> None:
        self._folder = folder
        self.upstream = upstream
        self.backends = backends
        self.sizes = sizes
        self._results = results

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A new one that goes with the block."""
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            yield Path(name)

    def leave_out(self, what: str, why: str) -> None:
        self._results.leave_out(what, why)

    def note(self, run: Run, what: str) -> Run:
        """Write a run down, and tell of it while others are still to come."""
        self._results.add_run(run, what)
        pace = f"{run.lines:,} lines, {run.lines_per_second:,.0f}/s, {run.cpu_us:,.1f} us a line"
        say(f"{self._results.clock()} {what}: {run.contestant}, {pace}")
        return run
