"""How long those wait who only ask how far a batch is, while the service is as busy as it can be."""

from contextlib import ExitStack

from bench.contestants import Run, travel, warm_up
from bench.course import Course
from bench.figures import Figures, Table, count, figures, number
from bench.promises import Promise
from bench.results import Told
from bench.services import Backend, running_batchline
from bench.upstream import Plan

_PLAN = Plan()
_PROMISED_MS = 50
_PROMISED_POLLS = 200


def measure(course: Course) -> Told:
    told = {backend.name: figures(_polled(course, backend)) for backend in course.backends}
    return Told(
        figures=told,
        tables=[_table(list(told.values()))],
        promises=[promise for name, each in told.items() for promise in _promises(name, each)],
    )


def _polled(course: Course, backend: Backend) -> list[Run]:
    """One batch after the other through the same service, until there were enough polls."""
    runs: list[Run] = []
    with ExitStack() as stack:
        folder = stack.enter_context(course.folder())
        places = backend.places(folder / "data")
        service = stack.enter_context(running_batchline(places, backend, course.upstream.url))
        warm_up(service, course.upstream, folder, _PLAN)
        while _count(runs) < course.sizes.polls:
            run = travel(service, course.upstream, folder, _PLAN, lines=course.sizes.batchline_lines)
            runs.append(course.note(run, f"polls, {_count(runs)} so far"))
    return runs


def _count(runs: list[Run]) -> int:
    return sum(len(run.travelled.polls) for run in runs if run.travelled is not None)


def _table(told: list[Figures]) -> Table:
    heads = ("contestant", "batches", "lines each", "polls", "p50 ms", "p99 ms", "max ms")
    return Table(
        title="Polls, five a second, with the upstream at 0 ms", heads=heads, rows=[_row(each) for each in told]
    )


def _row(each: Figures) -> tuple[str, ...]:
    assert each.way is not None
    way = each.way
    times = (number(way.poll_p50_ms), number(way.poll_p99_ms), number(way.poll_max_ms))
    return (each.contestant, str(each.runs), count(each.lines), str(way.polls), *times)


def _promises(backend: str, told: Figures) -> list[Promise]:
    assert told.way is not None
    p99, polls = told.way.poll_p99_ms, told.way.polls
    return [
        Promise(what="polls during runs at 0 ms, p99", backend=backend, reached=p99, unit=" ms", under=_PROMISED_MS),
        Promise(what="- how many polls that is of", backend=backend, reached=polls, at_least=_PROMISED_POLLS),
    ]
