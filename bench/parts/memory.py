"""Measures the memory of all processes of a service under full load, with long lines."""

from bench.context import BenchContext
from bench.figures import MB, Table, count, figures
from bench.promises import Promise
from bench.results import PartResult
from bench.runs import Run, run_batchline
from bench.services import Backend
from bench.upstream import Plan

_PLANS = {"0 ms": Plan(), "200 ms": Plan(latency_ms=200)}
"""The plan with the most lines per second, and the plan with the most in flight."""
_PROMISED_MB = 200

_Runs = dict[str, list[Run]]
"""By the name of the plan."""


def measure(context: BenchContext) -> PartResult:
    runs: dict[str, _Runs] = {backend.name: {name: [] for name in _PLANS} for backend in context.backends}
    for _ in range(context.sizes.waiting_rounds):
        for backend in context.backends:
            for name, plan in _PLANS.items():
                runs[backend.name][name].append(context.add_run(_run(context, backend, plan), f"long lines, {name}"))
    return PartResult(
        figures={by: {name: figures(each) for name, each in plans.items()} for by, plans in runs.items()},
        tables=[_table(context, runs)],
        promises=[
            promise for backend in context.backends for promise in _promises(context, backend, runs[backend.name])
        ],
    )


def _run(context: BenchContext, backend: Backend, plan: Plan) -> Run:
    sizes = context.sizes
    with context.folder() as folder:
        return run_batchline(
            folder, backend, context.upstream, plan, lines=sizes.batchline_lines, line_bytes=sizes.long_line_bytes
        )


def _table(context: BenchContext, runs: dict[str, _Runs]) -> Table:
    return Table(
        title=f"Memory with lines of {context.sizes.long_line_bytes:,} bytes: the maximum of all runs; database and "
        "bucket after a plus",
        heads=("system", "lines", "RSS MB", "PSS MB", "USS MB", "in flight", "runs"),
        rows=[_row(name, each) for plans in runs.values() for name, each in plans.items()],
    )


def _row(name: str, runs: list[Run]) -> tuple[str, ...]:
    servers = max(run.servers_peak.pss for run in runs)
    return (
        f"{runs[0].system}, {name}",
        count(runs[0].lines),
        count(max(run.peak.rss for run in runs) / MB),
        count(max(run.peak.pss for run in runs) / MB) + (f" + {count(servers / MB)}" if servers else ""),
        count(max(run.peak.uss for run in runs) / MB),
        count(max(run.seen.peak_in_flight for run in runs)),
        str(len(runs)),
    )


def _promises(context: BenchContext, backend: Backend, runs: _Runs) -> list[Promise]:
    peaks = [run.peak for each in runs.values() for run in each]
    what = f"memory, {context.sizes.batchline_lines:,} lines of {context.sizes.long_line_bytes:,} bytes"
    rss, pss = max(peak.rss for peak in peaks) / MB, max(peak.pss for peak in peaks) / MB
    return [
        Promise(what=f"{what}, RSS of all", backend=backend.name, reached=rss, unit=" MB", under=_PROMISED_MB),
        Promise(what="- the same, shared pages counted once", backend=backend.name, reached=pss, unit=" MB"),
    ]
