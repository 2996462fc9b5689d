"""An empty service against one that has finished many batches: nobody should be able to tell them apart."""

from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import monotonic, sleep
from typing import Any

from msgspec import Struct

from bench.contestants import Run, travel, warm_up
from bench.course import Course, note
from bench.figures import Table, figures, number, ratio
from bench.filling import fill
from bench.meter import metering
from bench.services import EMBEDDED, Backend, Batchline, running_batchline
from bench.trip import Client
from bench.upstream import Plan

_PLAN = Plan()
_CALLS = 50
_LISTED = 2
"""Batches on a page, which even the empty service has by then."""


class Look(Struct, frozen=True, kw_only=True):
    """A service with some history."""

    batches: int
    run: Run
    list_batches_ms: float
    list_files_ms: float
    idle_cpu_ms_per_second: float


def measure(course: Course) -> tuple[Any, list[Table]]:
    """Only on the embedded parts, whose folder can be filled from outside."""
    backend = next((each for each in course.backends if each.name == EMBEDDED), None)
    if backend is None:
        course.leave_out("history", "it is measured on the embedded parts")
        return None, []
    many = course.sizes.finished_batches
    with course.folder() as filled:
        fill(filled / "data", many)
        looks: dict[int, list[Look]] = {0: [], many: []}
        for _ in range(course.sizes.rounds):
            with course.folder() as empty:
                looks[0].append(_look(course, backend, empty, batches=0))
            looks[many].append(_look(course, backend, filled, batches=many))
    return looks, [_table(looks[0], looks[many])]


def _look(course: Course, backend: Backend, folder: Path, *, batches: int) -> Look:
    with running_batchline(folder / "data", backend, course.upstream.url) as service:
        warm_up(service, course.upstream, folder, _PLAN)
        run = travel(service, course.upstream, folder, _PLAN, lines=course.sizes.history_lines)
        client = Client(service)
        return Look(
            batches=batches,
            run=note(run, f"after {batches:,} batches"),
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


def _table(empty: list[Look], filled: list[Look]) -> Table:
    return Table(
        title=f"A service with {filled[0].batches:,} finished batches",
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
