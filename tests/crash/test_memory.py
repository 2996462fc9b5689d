"""The largest batch there is: memory does not grow with it, and the service answers others meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from time import monotonic

import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.service import (
    Service,
    await_end,
    chat_line,
    chat_lines,
    counts_of,
    running_mock,
    running_service,
    submit,
)

_LINE_BYTES = 1_950
_MAX_GROWTH_SHARE = 0.85
"""Less than the input itself, so that nobody can have held it whole."""


class Watch:
    """Asks /healthz and looks at the memory, every 50 ms."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._over = Event()
        self._thread = Thread(target=self._keep_looking)
        self.peak_bytes = 0
        self.slowest = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()

    def _keep_looking(self) -> None:
        while not self._over.wait(0.05):
            began = monotonic()
            assert self._service.call("GET", "/healthz").status == 200
            self.slowest = max(self.slowest, monotonic() - began)
            self.peak_bytes = max(self.peak_bytes, resident_bytes(self._service))


def resident_bytes(service: Service) -> int:
    """Of all processes of the service."""
    total = 0
    for member in service.program.family():
        try:
            total += member.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


@pytest.mark.parametrize("lines", [32_000, pytest.param(49_000, marks=pytest.mark.proof)])
def test_a_batch_of_up_to_95_megabytes(tmp_path: Path, lines: int) -> None:
    """B1, C6, C12: the service, with one process that runs lines, may hold none of it whole, and answers others
    meanwhile. How soon is printed."""
    path = tmp_path / "large.jsonl"
    _write_large(path, lines)
    with running_mock() as mock, running_service(tmp_path, mock.url, worker_processes=1) as service:
        client = service.client()
        await_end(client, submit(client, chat_lines(f"warm up {n}" for n in range(500))).id)
        before = resident_bytes(service)

        watch = Watch(service)
        with watch.watching():
            uploaded = client.files.create(file=path, purpose="batch")
            created = client.batches.create(
                input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            batch = await_end(client, created.id)
    assert counts_of(batch) == (lines, lines, 0)
    growth = watch.peak_bytes - before
    print(f"\n{before >> 20} MiB before, {growth >> 20} MiB more at the peak; slowest /healthz {watch.slowest:.3f} s")
    assert 0 < growth < _MAX_GROWTH_SHARE * lines * _LINE_BYTES


def _write_large(path: Path, lines: int) -> None:
    with path.open("wb") as file:
        for n in range(lines):
            bare = len(chat_line(f"line-{n}", ""))
            file.write(chat_line(f"line-{n}", "x" * (_LINE_BYTES - bare)))
