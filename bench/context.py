"""What every part of the benchmark works with: the upstream, the backends, the sizes, temporary folders."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from bench.results import Results, print_progress
from bench.runs import Run
from bench.services import Backend
from bench.upstream import Upstream


class Sizes(Struct, frozen=True, kw_only=True):
    """How much each part measures."""

    rounds: int
    """Rounds for the figures that are promised as a median."""
    waiting_rounds: int
    """Rounds for the other figures, with an upstream that has a latency."""
    batchline_lines: int
    script_lines: dict[str, int]
    wrk_seconds: int
    """The length of a run of wrk in the part "trip"."""
    sending_seconds: int
    """The length of a run in the part "wrk"."""
    sending_rounds: int
    long_line_bytes: int
    polls: int
    """The least number of polls to measure."""
    growth: dict[int, int]
    """Number of lines, and how many runs have that many."""
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


class BenchContext:
    """What a part of the benchmark works with."""

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
        """Make a temporary folder that is removed with the block."""
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            yield Path(name)

    def leave_out(self, what: str, why: str) -> None:
        self._results.leave_out(what, why)

    def add_run(self, run: Run, what: str) -> Run:
        """Add a run to the results, print it as progress and return it."""
        self._results.add_run(run, what)
        pace = f"{run.lines:,} lines, {run.lines_per_second:,.0f}/s, {run.cpu_us:,.1f} us per line"
        print_progress(f"{self._results.clock()} {what}: {run.system}, {pace}")
        return run
