"""Long lines: what all processes of a service need together while it has as much to do as it can get."""

from bench.contestants import Run, run_batchline
from bench.course import Course
from bench.figures import MB, Table, count, figures
from bench.promises import Promise
from bench.results import Told
from bench.services import Backend
from bench.upstream import Plan

_PLANS = {"0 ms": Plan(), "200 ms": Plan(latency_ms=200)}
"""Where most lines go through in a second, and where most are in flight."""
_PROMISED_MB = 200

_Runs = dict[str, list[Run]]
"""By the name of the plan."""


def measure(course: Course) -> Told:
    runs: dict[str, _Runs] = {backend.name: {name: [] for name in _PLANS} for backend in course.backends}
    for _ in range(course.sizes.waiting_rounds):
        for backend in course.backends:
            for name, plan in _PLANS.items():
                runs[backend.name][name].append(course.note(_run(course, backend, plan), f"long lines, {name}"))
    return Told(
        figures={by: {name: figures(each) for name, each in plans.items()} for by, plans in runs.items()},
        tables=[_table(course, runs)],
        promises=[promise for backend in course.backends for promise in _promises(course, backend, runs[backend.name])],
    )


def _run(course: Course, backend: Backend, plan: Plan) -> Run:
    sizes = course.sizes
    with course.folder() as folder:
        return run_batchline(
            folder, backend, course.upstream, plan, lines=sizes.batchline_lines, line_bytes=sizes.long_line_bytes
        )


def _table(course: Course, runs: dict[str, _Runs]) -> Table:
    return Table(
        title=f"Memory with lines of {course.sizes.long_line_bytes:,} bytes: the most of any run, database and bucket "
        "after a plus",
        heads=("contestant", "lines", "RSS MB", "PSS MB", "USS MB", "in flight", "runs"),
        rows=[_row(name, each) for plans in runs.values() for name, each in plans.items()],
    )


def _row(name: str, runs: list[Run]) -> tuple[str, ...]:
    servers = max(run.servers_peak.pss for run in runs)
    return (
        f"{runs[0].contestant}, {name}",
        count(runs[0].lines),
        count(max(run.peak.rss for run in runs) / MB),
        count(max(run.peak.pss for run in runs) / MB) + (f" + {count(servers / MB)}" if servers else ""),
        count(max(run.peak.uss for run in runs) / MB),
        count(max(run.seen.peak_in_flight for run in runs)),
        str(len(runs)),
    )


def _promises(course: Course, backend: Backend, runs: _Runs) -> list[Promise]:
    peaks = [run.peak for each in runs.values() for run in each]
    what = f"memory, {course.sizes.batchline_lines:,} lines of {course.sizes.long_line_bytes:,} bytes"
    rss, pss = max(peak.rss for peak in peaks) / MB, max(peak.pss for peak in peaks) / MB
    return [
        Promise(what=f"{what}, RSS of all", backend=backend.name, reached=rss, unit=" MB", under=_PROMISED_MB),
        Promise(what="- the same, shared pages counted once", backend=backend.name, reached=pss, unit=" MB"),
    ]
