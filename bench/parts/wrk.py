"""batchline beside wrk, which does nothing but send: 64 in flight, in turns, so that a slower moment meets both."""

from bench.contestants import AT_ONCE, WRK, Run, ours, run_batchline, run_wrk, why_not
from bench.course import Course
from bench.figures import Figures, Table, count, figures, number, ratio
from bench.promises import Promise
from bench.results import Told
from bench.services import Backend
from bench.upstream import Plan

_LATENCIES = (20, 200)
_OVERHEAD_MS = 1.0
"""What an answer takes longer than the upstream's latency, about; only the length of the run depends on it."""
_PROMISED_PERCENT = 97
_HEADS = ("contestant", "runs", "answers/s", "of wrk's", "CPU us", "in flight")

_Turns = dict[str, Figures]
"""By contestant, wrk first."""


def measure(course: Course) -> Told:
    if why := why_not(WRK):
        course.leave_out(WRK, why)
        return Told(figures=None, tables=[], promises=[])
    turns = {latency: _take_turns(course, latency) for latency in _LATENCIES}
    return Told(
        figures=turns,
        tables=[_table(latency, told) for latency, told in turns.items()],
        promises=[
            promise
            for latency, told in turns.items()
            for backend in course.backends
            for promise in _promises(latency, backend.name, told[ours(backend)], told[WRK])
        ],
    )


def _take_turns(course: Course, latency: int) -> _Turns:
    """wrk is first, last, and between the rounds."""
    plan, name = Plan(latency_ms=latency), f"{latency} ms, {AT_ONCE} in flight"
    runs = [course.note(_wrk(course, plan), name)]
    for _ in range(course.sizes.sending_rounds):
        runs += [course.note(_batchline(course, backend, plan), name) for backend in course.backends]
        runs.append(course.note(_wrk(course, plan), name))
    names = dict.fromkeys(run.contestant for run in runs)
    return {name: figures([run for run in runs if run.contestant == name]) for name in names}


def _wrk(course: Course, plan: Plan) -> Run:
    return run_wrk(course.upstream, plan, seconds=course.sizes.sending_seconds)


def _batchline(course: Course, backend: Backend, plan: Plan) -> Run:
    lines = int(course.sizes.sending_seconds * AT_ONCE / (plan.latency_ms + _OVERHEAD_MS) * 1000)
    with course.folder() as folder:
        return run_batchline(folder, backend, course.upstream, plan, lines=lines, max_concurrency=AT_ONCE)


def _table(latency: int, told: _Turns) -> Table:
    return Table(
        title=f"Answers a second, first request to last answer, {AT_ONCE} in flight, upstream at {latency} ms",
        heads=_HEADS,
        rows=[_row(each, told[WRK]) for each in told.values()],
    )


def _row(each: Figures, wrk: Figures) -> tuple[str, ...]:
    return (
        each.contestant,
        str(each.runs),
        number(each.answers_per_second),
        ratio(each.answers_per_second, wrk.answers_per_second),
        number(each.cpu_us),
        count(each.peak_in_flight),
    )


def _promises(latency: int, backend: str, told: Figures, wrk: Figures) -> list[Promise]:
    percent = 100 * told.answers_per_second / wrk.answers_per_second
    pace = f"of wrk's pace at {latency} ms, {AT_ONCE} in flight"
    return [
        Promise(what=pace, backend=backend, reached=percent, unit=" %", at_least=_PROMISED_PERCENT),
        Promise(
            what=f"- most in flight at {latency} ms", backend=backend, reached=told.peak_in_flight, at_most=AT_ONCE
        ),
    ]
