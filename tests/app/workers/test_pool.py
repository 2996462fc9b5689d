"""Tests of `batchline serve` with a worker process: two processes that run lines of one folder (F1, F2, F5)."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.support.fleet import metric, progress_of
from tests.support.service import (
    Service,
    await_end,
    chat_lines,
    counts_of,
    results_of,
    running_mock,
    submit,
    wait_until,
)
from tests.support.worker_pool import RESCUED, is_connected_to, running_pool, start_worker_process, worker_processes_of

_CAP = 12
_LINES = 300


def test_lines_of_many_batches_run_in_both_and_count_once(tmp_path: Path) -> None:
    """C12, F5: every line is in one of the two files, once; counts and metrics are those of one service, and none of
    them falls when the worker process dies."""
    inputs = [
        chat_lines("[[status=400]]" if n % 100 == 7 else f"{batch} {n}" for n in range(_LINES)) for batch in range(4)
    ]
    with running_mock() as mock, running_pool(tmp_path, mock.url, max_concurrency=_CAP) as service:
        client, child = service.client(), start_worker_process(service, mock, cap=_CAP)
        recorded = mock.stats()["requests"] + 4 * _LINES
        batches = [submit(client, lines) for lines in inputs]
        for batch, lines in zip(batches, inputs, strict=True):
            ended = await_end(client, batch.id)
            assert (ended.status, counts_of(ended)) == ("completed", (_LINES, _LINES - 3, 3))
            failed = [name for name, record in results_of(client, ended, lines).items() if record["error"]]
            assert sorted(failed) == ["line-107", "line-207", "line-7"]
        wait_until(
            lambda: metric(service, "batchline_lines_total") >= recorded,
            what="the last heartbeat of the worker process",
        )
        child.kill()
        wait_until(lambda: "worker process died" in service.log, what="the log line about the death")
        assert metric(service, "batchline_lines_total") == recorded
        assert metric(service, "batchline_attempts_total") == metric(service, "batchline_upstream_seconds_count")
        stats = mock.stats()
        assert stats["requests"] == recorded
        assert RESCUED not in service.log, "the process held no lease any more"


def _lease_holders(service: Service) -> int:
    """Return the number of processes that hold shards now."""
    with closing(sqlite3.connect(service.data_dir / "batchline.sqlite")) as connection:
        (holders,) = connection.execute("SELECT count(DISTINCT owner) FROM shards").fetchone()
    return int(holders)


def test_lines_of_a_dead_worker_process_run_again_at_once(tmp_path: Path) -> None:
    """C12, D5: nothing is lost and nothing counts twice; the other process keeps its leases, and a new one starts."""
    size = 1200
    lines = chat_lines(f"[[delay=0.1]] {n}" for n in range(size))
    # The lease is so long that only the news of the death, and not its end, can free the lines in time.
    with running_mock() as mock, running_pool(tmp_path, mock.url, max_concurrency=_CAP, lease_seconds=600) as service:
        client, child = service.client(), start_worker_process(service, mock, cap=_CAP)
        batch = submit(client, lines)
        wait_until(lambda: mock.stats()["in_flight"] == _CAP, what="lines in flight")
        wait_until(lambda: counts_of(client.batches.retrieve(batch.id))[1] > 0, what="a record")
        wait_until(lambda: _lease_holders(service) == 2, what="leases of both processes")
        child.kill()
        wait_until(lambda: RESCUED in service.log, what="the rescue")
        ended = await_end(client, batch.id)
        assert counts_of(ended) == (size, size, 0)
        assert not any(record["error"] for record in results_of(client, ended, lines).values())
        assert len(worker_processes_of(service)) == 1
        assert service.log.count(RESCUED) == 1
        stats = mock.stats()
        # The process had half of what was in flight, and half of the answers since the last record. Answers are
        # recorded every second; a busy machine may be late by another second.
        assert 0 < stats["requests"] - stats["distinct"] <= _CAP / 2 + 2 * _CAP / 2 * 10


def test_worker_processes_end_with_the_process_that_started_them(tmp_path: Path) -> None:
    """C7, F5: however the service ends and whatever they wait for; the next start takes the folder over and finishes
    what both had begun."""
    lines = chat_lines(f"taken over {n}" for n in range(300))
    with running_mock() as mock, running_pool(tmp_path, mock.url, max_concurrency=_CAP) as service:
        child = start_worker_process(service, mock, cap=_CAP)
        mock.follow(hang=100)
        batch = submit(service.client(), lines)
        wait_until(lambda: mock.stats()["in_flight"] == _CAP, what="lines in flight")
        service.kill()
        wait_until(lambda: not _runs(child), what="the end of the worker process")
        mock.follow()
        service.restart()
        ended = await_end(service.client(), batch.id)
        assert counts_of(ended) == (300, 300, 0)
        results_of(service.client(), ended, lines)


def test_sigterm_lets_the_lines_of_all_processes_finish(tmp_path: Path) -> None:
    """F5: the service ends with 0 after its worker processes, no line runs twice, and leases are released, not left to
    expire. A terminal's Ctrl-C does not reach the worker processes, so that this holds for it too."""
    lines = chat_lines(f"[[delay=0.7]] {n}" for n in range(32))
    with running_mock() as mock, running_pool(tmp_path, mock.url, max_concurrency=_CAP) as service:
        child = start_worker_process(service, mock, cap=_CAP)
        assert os.getsid(child.pid) != os.getsid(service.pid)
        before = mock.stats()["requests"]
        batch = submit(service.client(), lines)
        wait_until(lambda: mock.stats()["requests"] - before >= _CAP, what="lines at the upstream")
        assert service.terminate() == 0
        assert not _runs(child)
        assert "worker process died" not in service.log
        assert set(mock.stats()["requests_by_status"]) == {"200"}

        service.restart()
        ended = await_end(service.client(), batch.id)
        assert not any(record["error"] for record in results_of(service.client(), ended, lines).values())
        assert mock.stats()["requests"] == mock.stats()["distinct"]
        assert RESCUED not in service.log


def test_a_cap_holds_over_all_processes(tmp_path: Path) -> None:
    """F2: from the first line on, while a worker process starts and while it works; and all of the cap is used. The
    progress of a batch counts the lines in flight of both."""
    with running_mock() as mock, running_pool(tmp_path, mock.url, max_concurrency=_CAP, lease_seconds=6) as service:
        child, client = start_worker_process(service, mock, cap=_CAP), service.client()
        # So many lines that the batch cannot end before both processes have reported.
        batch = submit(client, chat_lines(f"[[delay=0.5]] cap {n}" for n in range(4000)))
        wait_until(
            lambda: mock.stats()["in_flight"] == _CAP and is_connected_to(child, mock), what="the whole cap in use"
        )
        wait_until(lambda: progress_of(service, batch.id)["in_flight"] == _CAP, what="progress that counts both")
        assert progress_of(service, batch.id)["concurrency"] == _CAP
        client.batches.cancel(batch.id)
        assert await_end(client, batch.id).status == "cancelled"
        assert mock.stats()["peak_in_flight"] == _CAP
        assert RESCUED not in service.log, "both processes kept their leases"


def test_worker_processes_start_and_end_without_an_effect_on_lines(tmp_path: Path) -> None:
    """C12, F2: a process that is not needed releases what it has not begun; nothing runs twice, and the cap holds."""
    lines = chat_lines(f"[[delay=0.1]] {n}" for n in range(600))
    with running_mock() as mock, running_pool(tmp_path, mock.url, spare=99.0, max_concurrency=_CAP) as service:
        client = service.client()
        batch = submit(client, lines)
        ended = await_end(client, batch.id)
        assert counts_of(ended) == (600, 600, 0)
        results_of(client, ended, lines)
        wait_until(lambda: "worker process ended" in service.log, what="the end of a worker process without work")
        stats = mock.stats()
        assert (stats["requests"], stats["distinct"]) == (600, 600)
        assert stats["peak_in_flight"] <= _CAP
        assert RESCUED not in service.log
        wait_until(lambda: metric(service, "batchline_lines_total") >= 600, what="the last numbers")
        assert metric(service, "batchline_lines_total") == 600


def test_a_cancel_reaches_the_worker_process(tmp_path: Path) -> None:
    """C10: what it has in flight may finish, nothing more is started, and the batch ends."""
    lines = chat_lines(f"[[delay=0.5]] {n}" for n in range(400))
    with running_mock() as mock, running_pool(tmp_path, mock.url, max_concurrency=_CAP) as service:
        start_worker_process(service, mock, cap=_CAP)
        client = service.client()
        batch = submit(client, lines)
        wait_until(lambda: mock.stats()["in_flight"] == _CAP, what="lines in flight")
        client.batches.cancel(batch.id)
        ended = await_end(client, batch.id)
        assert ended.status == "cancelled"
        assert len(results_of(client, ended, lines)) == 400


def test_a_machine_that_starts_no_further_process_goes_on_with_one(tmp_path: Path) -> None:
    """F5: for lack of memory, for example; no part of the cap is kept for processes that did not start."""
    lines = chat_lines(f"[[delay=0.1]] {n}" for n in range(100))
    refuse = (
        "import asyncio\nasync def refuse(*_, **__): raise OSError('no more')\nasyncio.create_subprocess_exec = refuse"
    )
    with running_mock() as mock, running_pool(tmp_path, mock.url, more=refuse, max_concurrency=_CAP) as service:
        client = service.client()
        ended = await_end(client, submit(client, lines).id)
        assert counts_of(ended) == (100, 100, 0)
        assert "failed to start a worker process" in service.log
        assert mock.stats()["peak_in_flight"] == _CAP
        assert service.terminate() == 0


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
