"""Few lines and many: the cost of a line and the memory should not grow with their number."""

from typing import Any

from bench.contestants import run_batchline
from bench.course import Course, note
from bench.figures import Figures, Table, count, figures, number, ratio
from bench.lines import MOST_LINES
from bench.upstream import Plan


def measure(course: Course) -> tuple[Any, list[Table]]:
    told = [_grown(course, lines, rounds) for lines, rounds in course.sizes.growth.items()]
    heads = ("lines", "runs", "lines/s", "CPU us/line", "ratio", "PSS MB", "ratio", "to completed ms", "poll p99 ms")
    table = Table(
        title=f"From few lines to many, in batches of {MOST_LINES:,} at most; ratios are to the first row",
        heads=heads,
        rows=[_row(each, told[0]) for each in told],
    )
    return told, [table]


def _grown(course: Course, lines: int, rounds: int) -> Figures:
    runs = []
    for _ in range(rounds):
        with course.folder() as folder:
            run = run_batchline(folder, course.backends[0], course.upstream, Plan(), lines=lines)
        runs.append(note(run, "growth"))
    return figures(runs)


def _row(each: Figures, first: Figures) -> tuple[str, ...]:
    return (
        count(each.lines),
        str(each.runs),
        number(each.lines_per_second),
        number(each.cpu_us),
        ratio(each.cpu_us, first.cpu_us),
        number(each.pss_mb),
        ratio(each.pss_mb, first.pss_mb),
        number(each.way.tail_ms if each.way else None),
        number(each.way.poll_p99_ms if each.way else None),
    )
