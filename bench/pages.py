"""``python -m bench.pages`` measures the pages of the console: their time, their bytes, and what an open page costs.

It fills a service with 10,000 finished batches, 100 open ones and one of 50,000 lines. Needs about two minutes, and a
machine that does nothing else.
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep

from msgspec import Struct

from bench.figures import Table, number
from bench.meter import metering
from bench.prefill import prefill
from tests.support.console import ADMIN_PAGES, PAGES, Visitor, visitor
from tests.support.service import Service, await_end, chat_lines, running_mock, running_service, submit

_FINISHED_BATCHES, _OPEN_BATCHES, _LINES = 10_000, 100, 50_000
_REQUESTS = 40
_GOAL_MS = 100.0
_LIVE_PAGES, _LIVE_SECONDS = 10, 20.0
_SLOW_LINES = 400
_ADMIN_TOKEN = "token-of-the-administrator"
_BATCH_ID = re.compile(r"batch_\w+")
_ASSETS = ("console.css", "console.js", "icon.svg")


class PageTime(Struct, frozen=True, kw_only=True):
    """The time of the server and the connection for one page, without the first request."""

    path: str
    first_ms: float
    median_ms: float
    slow_ms: float
    """The time that 95 of 100 requests keep below."""


def main() -> None:
    """Measure, print the tables, and fail if a page is slower than its goal."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="batchline-pages-")))
        mock = stack.enter_context(running_mock())
        prefill({"data_dir": folder / "data"}, _FINISHED_BATCHES)
        service = stack.enter_context(running_service(folder, mock.url, admin_token=_ADMIN_TOKEN))
        large = _run_batches(service)
        person = stack.enter_context(visitor(service.port, service.account["api_key"]))
        admin = stack.enter_context(visitor(service.port))
        admin.sign_in(_ADMIN_TOKEN)
        times = [_time(person, path) for path in _paths(large)] + [_time(admin, path) for path in ADMIN_PAGES]
        print(_table(times).text())
        print(f"The first page with its stylesheet, script and icon: {_first_bytes(person):,} bytes")
        print(f"A live page of a running batch: {_live_cost(service, person):.2%} of a core")
    sys.exit(any(each.slow_ms > _GOAL_MS for each in times))


def _run_batches(service: Service) -> str:
    """Run the large batch and start the open ones. Return the id of the large one."""
    client = service.client()
    large = submit(client, chat_lines(f"question {n}" for n in range(_LINES))).id
    await_end(client, large)
    for _ in range(_OPEN_BATCHES):
        submit(client, chat_lines(["[[hang]]", "[[hang]]"]))
    return large


def _paths(large: str) -> Iterator[str]:
    one = f"/console/batches/{large}"
    yield from PAGES
    yield from ("/console/batches?status=in_progress", "/console/batches?search=nothing")
    yield from (one, f"{one}/lines", f"{one}/lines?page=1000", f"{one}/lines?status=failed", f"{one}/lines/25000")
    yield from (f"{one}/lines?search=line-49999", "/console/search?custom_id=no-line-has-this")


def _time(visitor: Visitor, path: str) -> PageTime:
    seconds = []
    for _ in range(_REQUESTS + 1):
        began = monotonic()
        visitor.page(path)
        seconds.append(monotonic() - began)
    first, *later = seconds
    later.sort()
    return PageTime(
        path=_BATCH_ID.sub("ID", path),
        first_ms=first * 1000,
        median_ms=later[len(later) // 2] * 1000,
        slow_ms=later[int(len(later) * 0.95)] * 1000,
    )


def _table(times: list[PageTime]) -> Table:
    return Table(
        title=f"Pages with {_FINISHED_BATCHES:,} batches and one of {_LINES:,} lines, {_REQUESTS} requests each",
        heads=("page", "first ms", "median ms", "95 of 100 ms", "goal ms"),
        rows=[
            (each.path, number(each.first_ms), number(each.median_ms), number(each.slow_ms), number(_GOAL_MS))
            for each in times
        ],
    )


def _first_bytes(visitor: Visitor) -> int:
    paths = ["/console/batches", *(f"/console/assets/{name}" for name in _ASSETS)]
    return sum(visitor.get(path).num_bytes_downloaded for path in paths)


def _live_cost(service: Service, visitor: Visitor) -> float:
    """Return the part of a core that one live page takes, from the difference between ten of them and none."""
    return (_cores(service, visitor, _LIVE_PAGES) - _cores(service, visitor, 0)) / _LIVE_PAGES


def _cores(service: Service, visitor: Visitor, pages: int) -> float:
    """Return the cores that a service takes while a batch runs slowly and some pages of it are open."""
    client = service.client()
    batch = submit(client, chat_lines(f"[[delay={2 + n % 7}]] {n}" for n in range(_SLOW_LINES))).id
    with ThreadPoolExecutor(_LIVE_PAGES) as readers, metering(service.pid) as meter:
        reading = [readers.submit(_read_events, visitor, f"/console/batches/{batch}/events") for _ in range(pages)]
        sleep(_LIVE_SECONDS)
    for each in reading:
        each.result()
    client.batches.cancel(batch)
    await_end(client, batch)
    return meter.cpu_seconds / meter.seconds


def _read_events(visitor: Visitor, path: str) -> None:
    until = monotonic() + _LIVE_SECONDS
    with visitor.http.stream("GET", path) as answer:
        for _ in answer.iter_raw():
            if monotonic() > until:
                return


if __name__ == "__main__":
    main()
