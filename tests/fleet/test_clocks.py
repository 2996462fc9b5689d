"""A node of a fleet whose clock is wrong: it ends nothing, dates nothing and says so (B4, C11, C13, F5)."""

import time
from pathlib import Path

import pytest

from tests.support.fleet import metric, running_fleet
from tests.support.postgres_server import Postgres
from tests.support.s3_server import Seaweed
from tests.support.service import await_end, chat_lines, results_of, running_mock, submit, wait_until
from tests.support.wrong_clock import WrongClock

_HOUR = 3600.0
_AHEAD = 25 * _HOUR


@pytest.mark.rule("C13", "A node whose clock is a day ahead expires no batch of the fleet.")
def test_nodes_a_day_ahead_end_nothing(tmp_path: Path, postgres: Postgres, seaweed: Seaweed) -> None:
    """All lines are run by the worker whose clock is wrong, of batches from either API."""
    lines = chat_lines(f"[[delay=0.2]] {n}" for n in range(120))
    wrong = WrongClock(tmp_path / "clock", ahead=_AHEAD)
    with (
        running_mock() as mock,
        running_fleet(
            tmp_path, "api", postgres=postgres, seaweed=seaweed, upstream_url=mock.url, max_concurrency=4
        ) as fleet,
    ):
        before = submit(fleet.client(), lines)
        worker, api = (fleet.add(role, command=wrong.command(role)) for role in ("worker", "api"))
        for node in (worker, api):
            clock = node.call("GET", "/readyz").json["clock"]
            assert "90000 seconds ahead of that of the database, which decides" in clock
            wait_until(lambda node=node: "ahead of that of the database" in node.log, what="a warning")  # type: ignore[misc]
        assert metric(worker, "batchline_clock_offset_seconds") == pytest.approx(_AHEAD, abs=60)
        during = submit(api.client(), lines)
        for batch in (before, during):
            ended = await_end(fleet.client(), batch.id)
            assert ended.status == "completed"
            assert len(results_of(fleet.client(), ended, lines)) == 120
            times = [ended.created_at, ended.in_progress_at, ended.finalizing_at, ended.completed_at]
            assert all(at is not None and abs(at - time.time()) < _HOUR for at in times)
        created = [file.created_at for file in fleet.client().files.list()]
        assert all(abs(at - time.time()) < _HOUR for at in created)
