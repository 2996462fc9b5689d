"""Compares batchline with wrk, which only sends: 64 in flight, in turns, so that a slow phase affects both."""

from bench.context import BenchContext
from bench.figures import Figures, Table, count, figures, number, ratio
from bench.promises import Promise
from bench.results import PartResult
from bench.runs import CONCURRENCY, WRK, Run, batchline_name, missing_reason, run_batchline, run_wrk
from bench.services import Backend
from bench.upstream import Plan

_LATENCIES = (20, 200)
_OVERHEAD_MS = 1.0
"""About how much longer than the upstream's latency an answer takes; only the length of a run depends on it."""
_PROMISED_PERCENT = 97
_HEADS = ("system", "runs", "answers/s", "of wrk's", "CPU us", "in flight")

_FiguresBySystem = dict[str, Figures]
"""The figures by system, wrk first."""


def measure(context: BenchContext) -> PartResult:
    if reason := missing_reason(WRK):
        context.leave_out(WRK, reason)
        return PartResult(figures=None, tables=[], promises=[])
    results_by_latency = {latency: _take_turns(context, latency) for latency in _LATENCIES}
    return PartResult(
        figures=results_by_latency,
        tables=[_table(latency, results) for latency, results in results_by_latency.items()],
        promises=[
            promise
            for latency, results in results_by_latency.items()
            for backend in context.backends
            for promise in _promises(latency, backend.name, results[batchline_name(backend)], results[WRK])
        ],
    )


def _take_turns(context: BenchContext, latency: int) -> _FiguresBySystem:
    """Run the systems in turns, with wrk first, last, and between the rounds."""
    plan, name = Plan(latency_ms=latency), f"{latency} ms, {CONCURRENCY} in flight"
    runs = [context.add_run(_wrk(context, plan), name)]
    for _ in range(context.sizes.sending_rounds):
        runs += [context.add_run(_batchline(context, backend, plan), name) for backend in context.backends]
        runs.append(context.add_run(_wrk(context, plan), name))
    names = dict.fromkeys(run.system for run in runs)
    return {name: figures([run for run in runs if run.system == name]) for name in names}


def _wrk(context: BenchContext, plan: Plan) -> Run:
    return run_wrk(context.upstream, plan, seconds=context.sizes.sending_seconds)


def _batchline(context: BenchContext, backend: Backend, plan: Plan) -> Run:
    lines = int(context.sizes.sending_seconds * CONCURRENCY / (plan.latency_ms + _OVERHEAD_MS) * 1000)
    with context.folder() as folder:
        return run_batchline(folder, backend, context.upstream, plan, lines=lines, max_concurrency=CONCURRENCY)


def _table(latency: int, results: _FiguresBySystem) -> Table:
    return Table(
        title=f"Answers per second, first request to last answer, {CONCURRENCY} in flight, upstream at {latency} ms",
        heads=_HEADS,
        rows=[_row(each, results[WRK]) for each in results.values()],
    )


def _row(each: Figures, wrk: Figures) -> tuple[str, ...]:
    return (
        each.system,
        str(each.runs),
        number(each.answers_per_second),
        ratio(each.answers_per_second, wrk.answers_per_second),
        number(each.cpu_us),
        count(each.peak_in_flight),
    )


def _promises(latency: int, backend: str, results: Figures, wrk: Figures) -> list[Promise]:
    percent = 100 * results.answers_per_second / wrk.answers_per_second
    speed = f"of wrk's speed at {latency} ms, {CONCURRENCY} in flight"
    return [
        Promise(what=speed, backend=backend, reached=percent, unit=" %", at_least=_PROMISED_PERCENT),
        Promise(
            what=f"- most in flight at {latency} ms",
            backend=backend,
            reached=results.peak_in_flight,
            at_most=CONCURRENCY,
        ),
    ]
