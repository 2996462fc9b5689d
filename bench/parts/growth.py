"""Measures whether CPU per line and memory stay the same as the number of lines grows."""

from collections.abc import Iterator, Mapping

from bench.context import BenchContext
from bench.figures import Figures, Table, count, figures, number, ratio
from bench.lines import MAX_BATCH_LINES
from bench.promises import Promise
from bench.results import PartResult
from bench.runs import Run, run_batchline
from bench.services import Backend
from bench.upstream import Plan

_FEW = 10_000
"""The number of lines to compare with: for fewer, the clock that counts CPU time is too coarse."""
_PROMISED_RATIO = 1.1
_HEADS = ("lines", "runs", "lines/s", "CPU us/line", "ratio", "PSS MB", "ratio", "to completed ms", "poll p99 ms")


def measure(context: BenchContext) -> PartResult:
    by_backend = {backend.name: _measure_sizes(context, backend) for backend in context.backends}
    return PartResult(
        figures=by_backend,
        tables=[_table(name, sizes) for name, sizes in by_backend.items()],
        promises=[_promise(name, sizes) for name, sizes in by_backend.items()],
    )


def _measure_sizes(context: BenchContext, backend: Backend) -> dict[int, Figures]:
    runs: dict[int, list[Run]] = {lines: [] for lines in context.sizes.growth}
    for lines in in_turns(context.sizes.growth):
        with context.folder() as folder:
            run = run_batchline(folder, backend, context.upstream, Plan(), lines=lines)
        runs[lines].append(context.add_run(run, "growth"))
    return {lines: figures(each) for lines, each in runs.items()}


def in_turns(times: dict[int, int]) -> Iterator[int]:
    """Yield each size as often as it is wanted, spread over the rounds, so that a slow phase affects all sizes."""
    rounds = max(times.values())
    for turn in range(rounds):
        for size, wanted in reversed(times.items()):
            if turn * wanted // rounds != (turn + 1) * wanted // rounds:
                yield size


def _table(backend: str, figures_by_size: Mapping[int, Figures]) -> Table:
    return Table(
        title=f"From few lines to many, {backend}, batches of {MAX_BATCH_LINES:,} lines; ratios are to {_FEW:,} lines",
        heads=_HEADS,
        rows=[_row(each, figures_by_size[_FEW]) for each in figures_by_size.values()],
    )


def _row(each: Figures, few: Figures) -> tuple[str, ...]:
    return (
        count(each.lines),
        str(each.runs),
        number(each.lines_per_second),
        number(each.cpu_us),
        ratio(each.cpu_us, few.cpu_us),
        number(each.pss_mb),
        ratio(each.pss_mb, few.pss_mb),
        number(each.steps.tail_ms if each.steps else None),
        number(each.steps.poll_p99_ms if each.steps else None),
    )


def _promise(backend: str, figures_by_size: Mapping[int, Figures]) -> Promise:
    many = max(figures_by_size)
    return Promise(
        what=f"CPU per line, {many:,} lines against {_FEW:,}",
        backend=backend,
        reached=figures_by_size[many].cpu_us / figures_by_size[_FEW].cpu_us,
        unit="x",
        at_most=_PROMISED_RATIO,
    )
