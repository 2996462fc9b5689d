"""SIGTERM: what is in flight finishes and is recorded, the rest goes back, and nothing runs twice (F5)."""

import signal
from pathlib import Path

import pytest

from tests.support.service import (
    Mock,
    await_end,
    chat_lines,
    results_of,
    running_mock,
    running_service,
    submit,
    wait_until,
)

_RESCUED = "took over from a dead process"


@pytest.mark.rule("F5", "SIGTERM: what is in flight finishes, the rest is handed back.")
def test_lines_in_flight_finish_and_none_runs_twice(tmp_path: Path) -> None:
    """F5: the process ends by itself with 0, and its leases are handed back, not left to lapse."""
    lines = chat_lines(f"[[delay=2]] {n}" for n in range(12))
    with running_mock() as mock, running_service(tmp_path, mock.url, max_concurrency=6) as service:
        batch = submit(service.client(), lines)
        _await_in_flight(mock, 6)
        assert service.terminate() == 0
        assert mock.stats()["requests_by_status"] == {"200": 6}

        service.restart()
        ended = await_end(service.client(), batch.id)
        assert ended.status == "completed"
        assert not any(record["error"] for record in results_of(service.client(), ended, lines).values())
        stats = mock.stats()
        assert (stats["requests"], stats["distinct"]) == (12, 12)
        assert _RESCUED not in service.log


def test_a_line_that_outlasts_the_grace_is_cut_and_run_again(tmp_path: Path) -> None:
    """F5: only that one; its neighbour was recorded, and nobody is blamed for the cut."""
    lines = chat_lines(["[[hang times=1]] slow", "[[delay=0.5]] quick"])
    with running_mock() as mock, running_service(tmp_path, mock.url, shutdown_grace_seconds=4) as service:
        batch = submit(service.client(), lines)
        wait_until(lambda: mock.stats()["requests"] == 2, what="both lines at the upstream")
        assert service.terminate() == 0
        wait_until(lambda: mock.stats()["requests_by_status"] == {"200": 1, "left": 1}, what="the cut")

        service.restart()
        ended = await_end(service.client(), batch.id)
        assert not any(record["error"] for record in results_of(service.client(), ended, lines).values())
        assert mock.stats()["requests_by_status"] == {"200": 2, "left": 1}
        assert _RESCUED not in service.log


def test_a_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    """F5: whoever will not wait for the grace need not; the folder is whole, and the line runs in the next life."""
    lines = chat_lines(["[[hang times=1]]"])
    with running_mock() as mock, running_service(tmp_path, mock.url) as service:
        batch = submit(service.client(), lines)
        _await_in_flight(mock, 1)
        service.program.send(signal.SIGTERM)
        service.program.wait_for_log(r"(stopping; lines in flight may finish)")
        assert service.program.exit_code is None
        assert service.terminate() == 128 + signal.SIGTERM

        service.restart()
        ended = await_end(service.client(), batch.id)
        assert not any(record["error"] for record in results_of(service.client(), ended, lines).values())


def _await_in_flight(mock: Mock, count: int) -> None:
    wait_until(lambda: mock.stats()["in_flight"] == count, what=f"{count} lines in flight")
