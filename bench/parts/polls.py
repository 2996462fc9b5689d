"""Measures how long a poll of a batch takes while the service is under full load."""

from contextlib import ExitStack

from bench.context import BenchContext
from bench.figures import Figures, Table, count, figures, number
from bench.promises import Promise
from bench.results import PartResult
from bench.runs import Run, run_round_trip, warm_up
from bench.services import Backend, running_batchline
from bench.upstream import Plan

_PLAN = Plan()
_PROMISED_MS = 50
_PROMISED_POLLS = 200


def measure(context: BenchContext) -> PartResult:
    results = {backend.name: figures(_run_until_polled(context, backend)) for backend in context.backends}
    return PartResult(
        figures=results,
        tables=[_table(list(results.values()))],
        promises=[promise for name, each in results.items() for promise in _promises(name, each)],
    )


def _run_until_polled(context: BenchContext, backend: Backend) -> list[Run]:
    """Run one batch after the other through the same service until there are enough polls."""
    runs: list[Run] = []
    with ExitStack() as stack:
        folder = stack.enter_context(context.folder())
        storage = backend.storage(folder / "data")
        service = stack.enter_context(running_batchline(storage, backend, context.upstream.url))
        warm_up(service, context.upstream, folder, _PLAN)
        while _count(runs) < context.sizes.polls:
            run = run_round_trip(service, context.upstream, folder, _PLAN, lines=context.sizes.batchline_lines)
            runs.append(context.add_run(run, f"polls, {_count(runs)} so far"))
    return runs


def _count(runs: list[Run]) -> int:
    return sum(len(run.times.polls) for run in runs if run.times is not None)


def _table(results: list[Figures]) -> Table:
    heads = ("system", "batches", "lines each", "polls", "p50 ms", "p99 ms", "max ms")
    return Table(
        title="Polls, five per second, with the upstream at 0 ms", heads=heads, rows=[_row(each) for each in results]
    )


def _row(each: Figures) -> tuple[str, ...]:
    assert each.steps is not None
    steps = each.steps
    times = (number(steps.poll_p50_ms), number(steps.poll_p99_ms), number(steps.poll_max_ms))
    return (each.system, str(each.runs), count(each.lines), str(steps.polls), *times)


def _promises(backend: str, results: Figures) -> list[Promise]:
    assert results.steps is not None
    p99, polls = results.steps.poll_p99_ms, results.steps.polls
    return [
        Promise(what="polls during runs at 0 ms, p99", backend=backend, reached=p99, unit=" ms", under=_PROMISED_MS),
        Promise(what="- how many polls that is of", backend=backend, reached=polls, at_least=_PROMISED_POLLS),
    ]
