"""Measures lines per second and CPU per line of all systems, with the same upstream."""

from collections.abc import Iterator, Mapping

from bench.context import BenchContext
from bench.figures import Figures, Table, count, figures, number, ratio
from bench.promises import Promise
from bench.results import PartResult
from bench.runs import SCRIPTS, WRK, Run, batchline_name, missing_reason, run_batchline, run_script, run_wrk
from bench.services import Backend
from bench.upstream import Plan

_NO_WAIT, _WAIT, _FAULTS = "0 ms", "20 ms", "20 ms, faults"
PLANS = {
    _NO_WAIT: Plan(),
    _WAIT: Plan(latency_ms=20),
    "200 ms": Plan(latency_ms=200),
    _FAULTS: Plan(latency_ms=20, internal=5, throttled=5, cut=1),
}
_SPEED_RATIO_TO_SCRIPT = {"AsyncOpenAI script": 40.0, "aiohttp script": 2.5}
_PROMISED_CPU_US = 60
_CPU_RATIO_TO_SCRIPT = {"aiohttp script": 0.3}
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
_STEP_HEADS = (
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

_FiguresBySystem = dict[str, Figures]
"""The figures by system; the first is the one that the others are compared with."""


def measure(context: BenchContext) -> PartResult:
    results = {name: _measure_plan(context, name, plan) for name, plan in PLANS.items()}
    return PartResult(
        figures=results,
        tables=[*(_table(name, systems) for name, systems in results.items()), _step_table(results)],
        promises=[promise for backend in context.backends for promise in _promises(backend, results)],
    )


def _measure_plan(context: BenchContext, name: str, plan: Plan) -> _FiguresBySystem:
    """Measure all systems in turns, so that a slow phase affects all of them."""
    runs: dict[str, list[Run]] = {}
    rounds = context.sizes.rounds if name == _NO_WAIT else context.sizes.waiting_rounds
    for _ in range(rounds):
        for run in _run_each(context, name, plan):
            runs.setdefault(run.system, []).append(context.add_run(run, name))
    return {system: figures(each) for system, each in runs.items()}


def _run_each(context: BenchContext, name: str, plan: Plan) -> Iterator[Run]:
    """Run each system once; the scripts right after the batchline that is compared with them most."""
    first, *others = context.backends
    yield _batchline(context, first, plan)
    for script in reversed(SCRIPTS):
        if reason := missing_reason(script):
            context.leave_out(script, reason)
            continue
        with context.folder() as folder:
            yield run_script(script, folder, context.upstream, plan, lines=context.sizes.script_lines[script])
    for backend in others:
        yield _batchline(context, backend, plan)
    if reason := missing_reason(WRK):
        context.leave_out(WRK, reason)
    elif name != _FAULTS:
        yield run_wrk(context.upstream, plan, seconds=context.sizes.wrk_seconds)


def _batchline(context: BenchContext, backend: Backend, plan: Plan) -> Run:
    with context.folder() as folder:
        return run_batchline(folder, backend, context.upstream, plan, lines=context.sizes.batchline_lines)


def _promises(backend: Backend, results: Mapping[str, _FiguresBySystem]) -> Iterator[Promise]:
    no_wait, name = results[_NO_WAIT], backend.name
    batchline = no_wait[batchline_name(backend)]
    for script, times in _SPEED_RATIO_TO_SCRIPT.items():
        if script in no_wait:
            reached = batchline.lines_per_second / no_wait[script].lines_per_second
            what = f"lines/s at {_NO_WAIT} against the {script}"
            yield Promise(what=what, backend=name, reached=reached, unit="x", at_least=times)
    what = f"CPU per line at {_NO_WAIT}"
    yield Promise(what=what, backend=name, reached=batchline.cpu_us, unit=" us", at_most=_PROMISED_CPU_US)
    for script, fraction in _CPU_RATIO_TO_SCRIPT.items():
        if script in no_wait:
            reached = batchline.cpu_us / no_wait[script].cpu_us
            yield Promise(
                what=f"{what} against the {script}", backend=name, reached=reached, unit="x", at_most=fraction
            )
    yield from _step_promises(name, batchline)
    without_faults, with_faults = (results[plan][batchline_name(backend)] for plan in (_WAIT, _FAULTS))
    yield Promise(what=f"lines/s at {_WAIT}", backend=name, reached=without_faults.lines_per_second)
    yield Promise(what=f"lines/s at {_FAULTS}", backend=name, reached=with_faults.lines_per_second)
    yield Promise(what="- failed lines of it", backend=name, reached=with_faults.failed)


def _step_promises(backend: str, results: Figures) -> Iterator[Promise]:
    steps = results.steps
    assert steps is not None
    if steps.longest_tail_ms is not None:
        what = f"last answer to completed, {results.lines:,} lines, slowest run"
        yield Promise(what=what, backend=backend, reached=steps.longest_tail_ms, unit=" ms", under=_PROMISED_TAIL_MS)
    yield Promise(what="upload", backend=backend, reached=steps.upload_mb_per_second, unit=" MB/s")
    yield Promise(what="create", backend=backend, reached=steps.create_lines_per_second, unit=" lines/s")
    yield Promise(what="download", backend=backend, reached=steps.download_mb_per_second, unit=" MB/s")


def _table(name: str, systems: _FiguresBySystem) -> Table:
    first = next(iter(systems.values()))
    return Table(
        title=f"Upstream at {name}; ratios are to the first row; figures after a plus are of database and bucket",
        heads=("system", *_HEADS),
        rows=[_row(each, first, waits=PLANS[name].latency_ms > 0) for each in systems.values()],
    )


def _row(each: Figures, first: Figures, *, waits: bool) -> tuple[str, ...]:
    return (
        each.system,
        count(each.lines),
        str(each.runs),
        number(each.lines_per_second),
        ratio(each.lines_per_second, first.lines_per_second),
        number(each.cpu_us) + (f" + {number(each.servers_cpu_us)}" if each.servers_cpu_us else ""),
        ratio(each.cpu_us, first.cpu_us),
        f"{count(each.pss_mb)}, {count(each.uss_mb)}, {count(each.rss_mb)}"
        + (f" + {count(each.servers_pss_mb)}" if each.servers_pss_mb else ""),
        # An upstream that answers at once, one request after the other, never has two in flight.
        count(each.peak_in_flight) if waits else "-",
        count(each.failed),
        count(each.repeated),
        number(each.machine_cores),
    )


def _step_table(results: Mapping[str, _FiguresBySystem]) -> Table:
    return Table(
        title="The steps of batchline's round trips",
        heads=("upstream", *_STEP_HEADS),
        rows=[
            (
                f"{name}; {each.system}",
                number(each.steps.upload_mb_per_second),
                number(each.steps.create_lines_per_second),
                number(each.steps.download_mb_per_second),
                number(each.steps.tail_ms),
                number(each.steps.longest_tail_ms),
                str(each.steps.polls),
                number(each.steps.poll_p50_ms),
                number(each.steps.poll_p99_ms),
                number(each.steps.poll_max_ms),
            )
            for name, systems in results.items()
            for each in systems.values()
            if each.steps is not None
        ],
    )
