"""An empty service against one that has finished many batches: nobody should be able to tell them apart."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import monotonic, sleep

from msgspec import Struct

from bench.contestants import Run, travel, warm_up
from bench.course import Course
from bench.figures import Table, figures, number, ratio
from bench.filling import fill
from bench.meter import metering
from bench.promises import Promise
from bench.results import Told
from bench.services import Backend, Batchline, Places, running_batchline
from bench.trip import Client
from bench.upstream import Plan

_PLAN = Plan()
_CALLS = 50
_PROMISED_RATIO = 1.1
_LISTED = 2
"""Batches on a page, which even the empty service has by then."""


class Look(Struct, frozen=True, kw_only=True):
    """A service with some history."""

    batches: int
    run: Run
    list_batches_ms: float
    list_files_ms: float
    idle_cpu_ms_per_second: float


_Both = tuple[list[Look], list[Look]]
"""Empty services, and filled ones."""


def measure(course: Course) -> Told:
    looks = {backend.name: _compare(course, backend) for backend in course.backends}
    return Told(
        figures=looks,
        tables=[_table(name, *both) for name, both in looks.items()],
        promises=[_promise(name, *both) for name, both in looks.items()],
    )


def _compare(course: Course, backend: Backend) -> _Both:
    """In turns, so that a slower moment meets both."""
    many, without, with_them = course.sizes.finished_batches, [], []
    with course.folder() as filled:
        places = backend.places(filled / "data")
        fill(places, many)
        for _ in range(course.sizes.rounds):
            with course.folder() as empty:
                without.append(_look(course, backend, backend.places(empty / "data"), empty, batches=0))
            with_them.append(_look(course, backend, places, filled, batches=many))
    return without, with_them


def _look(course: Course, backend: Backend, places: Places, folder: Path, *, batches: int) -> Look:
    with running_batchline(places, backend, course.upstream.url) as service:
        warm_up(service, course.upstream, folder, _PLAN)
        run = travel(service, course.upstream, folder, _PLAN, lines=course.sizes.history_lines)
        client = Client(service)
        return Look(
            batches=batches,
            run=course.note(run, f"after {batches:,} batches"),
            list_batches_ms=_milliseconds(lambda: client.call("GET", f"/v1/batches?limit={_LISTED}")),
            list_files_ms=_milliseconds(lambda: client.call("GET", f"/v1/files?limit={_LISTED}")),
            idle_cpu_ms_per_second=_idle(service, course.sizes.idle_seconds),
        )


def _milliseconds(call: Callable[[], object]) -> float:
    took = []
    for _ in range(_CALLS):
        began = monotonic()
        call()
        took.append(monotonic() - began)
    return median(took) * 1000


def _idle(service: Batchline, seconds: float) -> float:
    with metering(service.pid) as meter:
        sleep(seconds)
    return meter.cpu_seconds / meter.seconds * 1000


def _promise(backend: str, empty: list[Look], filled: list[Look]) -> Promise:
    before, after = (figures([look.run for look in looks]).cpu_us for looks in (empty, filled))
    return Promise(
        what=f"CPU a line, with {filled[0].batches:,} finished batches against none",
        backend=backend,
        reached=after / before,
        unit="x",
        at_most=_PROMISED_RATIO,
    )


def _table(backend: str, empty: list[Look], filled: list[Look]) -> Table:
    return Table(
        title=f"A service with {filled[0].batches:,} finished batches, {backend}",
        heads=("", "empty", "with them", "ratio"),
        rows=[
            (name, number(before), number(after), ratio(after, before))
            for (name, before), after in zip(_shown(empty).items(), _shown(filled).values(), strict=True)
        ],
    )


def _shown(looks: list[Look]) -> dict[str, float]:
    told = figures([look.run for look in looks])
    way = told.way
    assert way is not None
    return {
        "lines/s": told.lines_per_second,
        "CPU us/line": told.cpu_us,
        "PSS MB": told.pss_mb,
        "create lines/s": way.create_lines_per_second,
        "to completed ms": way.tail_ms or 0,
        "poll p50 ms": way.poll_p50_ms,
        "poll p99 ms": way.poll_p99_ms,
        "list of batches ms": median(look.list_batches_ms for look in looks),
        "list of files ms": median(look.list_files_ms for look in looks),
        "idle CPU ms/s": median(look.idle_cpu_ms_per_second for look in looks),
    }
