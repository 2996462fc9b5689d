"""Everybody on the same upstream: how many lines a second, at which cost."""

from collections.abc import Iterator, Mapping

from bench.contestants import SCRIPTS, WRK, Run, ours, run_batchline, run_script, run_wrk, why_not
from bench.course import Course
from bench.figures import Figures, Table, count, figures, number, ratio
from bench.promises import Promise
from bench.results import Told
from bench.services import Backend
from bench.upstream import Plan

_NO_WAIT, _WAIT, _FAULTS = "0 ms", "20 ms", "20 ms, faults"
PLANS = {
    _NO_WAIT: Plan(),
    _WAIT: Plan(latency_ms=20),
    "200 ms": Plan(latency_ms=200),
    _FAULTS: Plan(latency_ms=20, internal=5, throttled=5, cut=1),
}
_TIMES_THE_SCRIPT = {"AsyncOpenAI script": 40.0, "aiohttp script": 2.5}
_PROMISED_CPU_US = 60
_CPU_OF_THE_SCRIPT = {"aiohttp script": 0.3}
_PROMISED_TAIL_MS = 1000
_HEADS = (
    "lines",
    "runs",
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
    "at most",
    "polls",
    "p50 ms",
    "p99 ms",
    "max ms",
)

_Field = dict[str, Figures]
"""By contestant, what all others are compared with first."""


def measure(course: Course) -> Told:
    told = {name: _race(course, name, plan) for name, plan in PLANS.items()}
    return Told(
        figures=told,
        tables=[*(_table(name, field) for name, field in told.items()), _way_table(told)],
        promises=[promise for backend in course.backends for promise in _promises(backend, told)],
    )


def _race(course: Course, name: str, plan: Plan) -> _Field:
    """In turns, so that a slower moment meets everybody."""
    runs: dict[str, list[Run]] = {}
    rounds = course.sizes.rounds if name == _NO_WAIT else course.sizes.waiting_rounds
    for _ in range(rounds):
        for run in _everybody(course, name, plan):
            runs.setdefault(run.contestant, []).append(course.note(run, name))
    return {contestant: figures(each) for contestant, each in runs.items()}


def _everybody(course: Course, name: str, plan: Plan) -> Iterator[Run]:
    """The scripts right after what is compared with them most."""
    first, *others = course.backends
    yield _batchline(course, first, plan)
    for script in reversed(SCRIPTS):
        if why := why_not(script):
            course.leave_out(script, why)
            continue
        with course.folder() as folder:
            yield run_script(script, folder, course.upstream, plan, lines=course.sizes.script_lines[script])
    for backend in others:
        yield _batchline(course, backend, plan)
    if why := why_not(WRK):
        course.leave_out(WRK, why)
    elif name != _FAULTS:
        yield run_wrk(course.upstream, plan, seconds=course.sizes.wrk_seconds)


def _batchline(course: Course, backend: Backend, plan: Plan) -> Run:
    with course.folder() as folder:
        return run_batchline(folder, backend, course.upstream, plan, lines=course.sizes.batchline_lines)


def _promises(backend: Backend, told: Mapping[str, _Field]) -> Iterator[Promise]:
    quick, name = told[_NO_WAIT], backend.name
    mine = quick[ours(backend)]
    for script, times in _TIMES_THE_SCRIPT.items():
        if script in quick:
            reached = mine.lines_per_second / quick[script].lines_per_second
            what = f"lines/s at {_NO_WAIT} against the {script}"
            yield Promise(what=what, backend=name, reached=reached, unit="x", at_least=times)
    what = f"CPU a line at {_NO_WAIT}"
    yield Promise(what=what, backend=name, reached=mine.cpu_us, unit=" us", at_most=_PROMISED_CPU_US)
    for script, share in _CPU_OF_THE_SCRIPT.items():
        if script in quick:
            reached = mine.cpu_us / quick[script].cpu_us
            yield Promise(what=f"{what} against the {script}", backend=name, reached=reached, unit="x", at_most=share)
    yield from _way_promises(name, mine)
    calm, troubled = (told[plan][ours(backend)] for plan in (_WAIT, _FAULTS))
    yield Promise(what=f"lines/s at {_WAIT}", backend=name, reached=calm.lines_per_second)
    yield Promise(what=f"lines/s at {_FAULTS}", backend=name, reached=troubled.lines_per_second)
    yield Promise(what="- failed lines of it", backend=name, reached=troubled.failed)


def _way_promises(backend: str, told: Figures) -> Iterator[Promise]:
    way = told.way
    assert way is not None
    if way.longest_tail_ms is not None:
        what = f"last answer to completed, {told.lines:,} lines, slowest run"
        yield Promise(what=what, backend=backend, reached=way.longest_tail_ms, unit=" ms", under=_PROMISED_TAIL_MS)
    yield Promise(what="upload", backend=backend, reached=way.upload_mb_per_second, unit=" MB/s")
    yield Promise(what="create", backend=backend, reached=way.create_lines_per_second, unit=" lines/s")
    yield Promise(what="download", backend=backend, reached=way.download_mb_per_second, unit=" MB/s")


def _table(name: str, field: _Field) -> Table:
    first = next(iter(field.values()))
    return Table(
        title=f"Upstream at {name}; ratios are to the first row, what stands after a plus is of database and bucket",
        heads=("contestant", *_HEADS),
        rows=[_row(each, first, waits=PLANS[name].latency_ms > 0) for each in field.values()],
    )


def _row(each: Figures, first: Figures, *, waits: bool) -> tuple[str, ...]:
    return (
        each.contestant,
        count(each.lines),
        str(each.runs),
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


def _way_table(told: Mapping[str, _Field]) -> Table:
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
                number(each.way.longest_tail_ms),
                str(each.way.polls),
                number(each.way.poll_p50_ms),
                number(each.way.poll_p99_ms),
                number(each.way.poll_max_ms),
            )
            for name, field in told.items()
            for each in field.values()
            if each.way is not None
        ],
    )
