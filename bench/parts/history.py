"""Compares an empty service with one that has finished many batches; there should be no difference."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import monotonic, sleep

from msgspec import Struct

from bench.context import BenchContext
from bench.figures import Table, figures, number, ratio
from bench.meter import metering
from bench.prefill import prefill
from bench.promises import Promise
from bench.results import PartResult
from bench.round_trip import Client
from bench.runs import Run, run_round_trip, warm_up
from bench.services import Backend, Batchline, StorageSettings, running_batchline
from bench.upstream import Plan

_PLAN = Plan()
_CALLS = 50
_PROMISED_RATIO = 1.1
_LISTED = 2
"""Batches per page; even the empty service has that many by then."""


class ServiceFigures(Struct, frozen=True, kw_only=True):
    """The figures of a service with this many finished batches."""

    batches: int
    run: Run
    list_batches_ms: float
    list_files_ms: float
    idle_cpu_ms_per_second: float


_Both = tuple[list[ServiceFigures], list[ServiceFigures]]
"""Empty services, and filled ones."""


def measure(context: BenchContext) -> PartResult:
    services = {backend.name: _compare(context, backend) for backend in context.backends}
    return PartResult(
        figures=services,
        tables=[_table(name, *both) for name, both in services.items()],
        promises=[_promise(name, *both) for name, both in services.items()],
    )


def _compare(context: BenchContext, backend: Backend) -> _Both:
    """Measure both in turns, so that a slow phase affects both."""
    many, empty_services, filled_services = context.sizes.finished_batches, [], []
    with context.folder() as filled:
        storage = backend.storage(filled / "data")
        prefill(storage, many)
        for _ in range(context.sizes.rounds):
            with context.folder() as empty:
                empty_services.append(
                    _measure_service(context, backend, backend.storage(empty / "data"), empty, batches=0)
                )
            filled_services.append(_measure_service(context, backend, storage, filled, batches=many))
    return empty_services, filled_services


def _measure_service(
    context: BenchContext, backend: Backend, storage: StorageSettings, folder: Path, *, batches: int
) -> ServiceFigures:
    with running_batchline(storage, backend, context.upstream.url) as service:
        warm_up(service, context.upstream, folder, _PLAN)
        run = run_round_trip(service, context.upstream, folder, _PLAN, lines=context.sizes.history_lines)
        client = Client(service)
        return ServiceFigures(
            batches=batches,
            run=context.add_run(run, f"after {batches:,} batches"),
            list_batches_ms=_milliseconds(lambda: client.call("GET", f"/v1/batches?limit={_LISTED}")),
            list_files_ms=_milliseconds(lambda: client.call("GET", f"/v1/files?limit={_LISTED}")),
            idle_cpu_ms_per_second=_idle(service, context.sizes.idle_seconds),
        )


def _milliseconds(call: Callable[[], object]) -> float:
    times = []
    for _ in range(_CALLS):
        began = monotonic()
        call()
        times.append(monotonic() - began)
    return median(times) * 1000


def _idle(service: Batchline, seconds: float) -> float:
    with metering(service.pid) as meter:
        sleep(seconds)
    return meter.cpu_seconds / meter.seconds * 1000


def _promise(backend: str, empty: list[ServiceFigures], filled: list[ServiceFigures]) -> Promise:
    before, after = (figures([service.run for service in services]).cpu_us for services in (empty, filled))
    return Promise(
        what=f"CPU per line, with {filled[0].batches:,} finished batches against none",
        backend=backend,
        reached=after / before,
        unit="x",
        at_most=_PROMISED_RATIO,
    )


def _table(backend: str, empty: list[ServiceFigures], filled: list[ServiceFigures]) -> Table:
    return Table(
        title=f"A service with {filled[0].batches:,} finished batches, {backend}",
        heads=("", "empty", "with them", "ratio"),
        rows=[
            (name, number(before), number(after), ratio(after, before))
            for (name, before), after in zip(_rows(empty).items(), _rows(filled).values(), strict=True)
        ],
    )


def _rows(services: list[ServiceFigures]) -> dict[str, float]:
    run_figures = figures([service.run for service in services])
    steps = run_figures.steps
    assert steps is not None
    return {
        "lines/s": run_figures.lines_per_second,
        "CPU us/line": run_figures.cpu_us,
        "PSS MB": run_figures.pss_mb,
        "create lines/s": steps.create_lines_per_second,
        "to completed ms": steps.tail_ms or 0,
        "poll p50 ms": steps.poll_p50_ms,
        "poll p99 ms": steps.poll_p99_ms,
        "list of batches ms": median(service.list_batches_ms for service in services),
        "list of files ms": median(service.list_files_ms for service in services),
        "idle CPU ms/s": median(service.idle_cpu_ms_per_second for service in services),
    }
