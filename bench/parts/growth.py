"""Few lines and many: the cost of a line and the memory should not grow with their number."""

from collections.abc import Iterator, Mapping

from bench.contestants import Run, run_batchline
from bench.course import Course
from bench.figures import Figures, Table, count, figures, number, ratio
from bench.lines import MOST_LINES
from bench.promises import Promise
from bench.results import Told
from bench.services import Backend
from bench.upstream import Plan

_FEW = 10_000
"""What the most are compared with: of less, the clock that counts CPU is too coarse."""
_PROMISED_RATIO = 1.1
_HEADS = ("lines", "runs", "lines/s", "CPU us/line", "ratio", "PSS MB", "ratio", "to completed ms", "poll p99 ms")


def measure(course: Course) -> Told:
    told = {backend.name: _grown(course, backend) for backend in course.backends}
    return Told(
        figures=told,
        tables=[_table(name, sizes) for name, sizes in told.items()],
        promises=[_promise(name, sizes) for name, sizes in told.items()],
    )


def _grown(course: Course, backend: Backend) -> dict[int, Figures]:
    runs: dict[int, list[Run]] = {lines: [] for lines in course.sizes.growth}
    for lines in in_turns(course.sizes.growth):
        with course.folder() as folder:
            run = run_batchline(folder, backend, course.upstream, Plan(), lines=lines)
        runs[lines].append(course.note(run, "growth"))
    return {lines: figures(each) for lines, each in runs.items()}


def in_turns(times: dict[int, int]) -> Iterator[int]:
    """Each size as often as it is wanted, spread over the rounds, so that a slower moment meets all of them."""
    rounds = max(times.values())
    for turn in range(rounds):
        for size, wanted in reversed(times.items()):
            if turn * wanted // rounds != (turn + 1) * wanted // rounds:
                yield size


def _table(backend: str, told: Mapping[int, Figures]) -> Table:
    return Table(
        title=f"From few lines to many, {backend}, in batches of {MOST_LINES:,} at most; ratios are to {_FEW:,} lines",
        heads=_HEADS,
        rows=[_row(each, told[_FEW]) for each in told.values()],
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
        number(each.way.tail_ms if each.way else None),
        number(each.way.poll_p99_ms if each.way else None),
    )


def _promise(backend: str, told: Mapping[int, Figures]) -> Promise:
    many = max(told)
    return Promise(
        what=f"CPU a line, {many:,} lines against {_FEW:,}",
        backend=backend,
        reached=told[many].cpu_us / told[_FEW].cpu_us,
        unit="x",
        at_most=_PROMISED_RATIO,
    )
