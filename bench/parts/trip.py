"""Everybody on the same upstream: how many lines a second, at which cost."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.contestants import SCRIPTS, WRK, Run, run_batchline, run_script, run_wrk, why_not
from bench.course import Course, note
from bench.figures import Figures, Table, count, figures, number, ratio
from bench.upstream import Plan

_FAULTS = "20 ms, faults"
PLANS = {
    "0 ms": Plan(),
    "20 ms": Plan(latency_ms=20),
    "200 ms": Plan(latency_ms=200),
    _FAULTS: Plan(latency_ms=20, internal=5, throttled=5, cut=1),
}
_HEADS = (
    "lines",
    "lines/s",
    "ratio",
    "CPU us/line",
    "ratio",
    "PSS, USS, RSS MB",
    "in flight",
    "failed",
    "twice",
    "busy cores",
)
_WAY_HEADS = (
    "upload MB/s",
    "create lines/s",
    "download MB/s",
    "to completed ms",
    "polls",
    "p50 ms",
    "p99 ms",
    "max ms",
)


def measure(course: Course) -> tuple[Any, list[Table]]:
    runs: dict[str, dict[str, list[Run]]] = {name: defaultdict(list) for name in PLANS}
    for _ in range(course.sizes.rounds):
        for name, plan in PLANS.items():
            for run in _everybody(course, name, plan):
                runs[name][run.contestant].append(note(run, name))
    told = {name: [figures(each) for each in by.values()] for name, by in runs.items()}
    return {"runs": runs, "figures": told}, [*(_table(name, rows) for name, rows in told.items()), _way_table(told)]


def _everybody(course: Course, name: str, plan: Plan) -> Iterator[Run]:
    sizes, upstream = course.sizes, course.upstream
    for backend in course.backends:
        with course.folder() as folder:
            yield run_batchline(folder, backend, upstream, plan, lines=sizes.batchline_lines)
    for script in SCRIPTS:
        if why := why_not(script):
            course.leave_out(script, why)
            continue
        with course.folder() as folder:
            yield run_script(script, folder, upstream, plan, lines=sizes.script_lines[script])
    if why := why_not(WRK):
        course.leave_out(WRK, why)
    elif name != _FAULTS:
        yield run_wrk(upstream, plan, seconds=sizes.wrk_seconds)


def _table(name: str, told: Sequence[Figures]) -> Table:
    return Table(
        title=f"Upstream at {name}; ratios are to the first row, what stands after a plus is of database and bucket",
        heads=("contestant", *_HEADS),
        rows=[_row(each, told[0], waits=PLANS[name].latency_ms > 0) for each in told],
    )


def _row(each: Figures, first: Figures, *, waits: bool) -> tuple[str, ...]:
    return (
        each.contestant,
        count(each.lines),
        number(each.lines_per_second),
        ratio(each.lines_per_second, first.lines_per_second),
        number(each.cpu_us) + (f" + {number(each.servers_cpu_us)}" if each.servers_cpu_us else ""),
        ratio(each.cpu_us, first.cpu_us),
        f"{count(each.pss_mb)}, {count(each.uss_mb)}, {count(each.rss_mb)}"
        + (f" + {count(each.servers_pss_mb)}" if each.servers_pss_mb else ""),
        # Who answers at once, one after the other, never has two in flight.
        count(each.peak_in_flight) if waits else "-",
        count(each.failed),
        count(each.repeated),
        number(each.machine_cores),
    )


def _way_table(told: Mapping[str, Sequence[Figures]]) -> Table:
    return Table(
        title="The steps of batchline's trips",
        heads=("upstream", *_WAY_HEADS),
        rows=[
            (
                f"{name}; {each.contestant}",
                number(each.way.upload_mb_per_second),
                number(each.way.create_lines_per_second),
                number(each.way.download_mb_per_second),
                number(each.way.tail_ms),
                str(each.way.polls),
                number(each.way.poll_p50_ms),
                number(each.way.poll_p99_ms),
                number(each.way.poll_max_ms),
            )
            for name, all_of_them in told.items()
            for each in all_of_them
            if each.way is not None
        ],
    )
