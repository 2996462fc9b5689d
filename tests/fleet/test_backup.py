"""The backup of a fleet: the database first, then the bucket, each with its own tools (docs/backup.md)."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.fleet import Fleet, running_fleet
from tests.support.postgres_server import Postgres
from tests.support.s3_server import Seaweed
from tests.support.service import await_end, chat_lines, counts_of, results_of, running_mock, submit, wait_until

_LINES = 120


@pytest.mark.rule("C12", "A batch that ended between the backups of database and bucket finishes after the restore.")
def test_a_batch_that_ends_between_the_two_backups_finishes_after_the_restore(
    tmp_path: Path, postgres: Postgres, seaweed: Seaweed
) -> None:
    """C12: in the copy of the database it runs. Its work file and its segments are still in the copy of the bucket."""
    dumped, copied = tmp_path / "dump", seaweed.new_url()
    lines = chat_lines(f"[[huge=5000 delay=0.05]] line {n}" for n in range(_LINES))
    with running_mock() as mock:
        settings: dict[str, Any] = {"upstream_url": mock.url, "lease_seconds": 3, "max_concurrency": 4}
        with running_fleet(tmp_path, "api", "worker", postgres=postgres, seaweed=seaweed, **settings) as fleet:
            account = fleet.apis[0].account
            batch = submit(fleet.client(), lines)
            wait_until(lambda: counts_of(fleet.client().batches.retrieve(batch.id))[1] > 0, what="the first record")
            postgres.dump(str(fleet.settings["database_url"]), dumped)
            assert await_end(fleet.client(), batch.id).status == "completed"
            # What is left when the worker has looked once more for what it may delete.
            wait_until(lambda: "sweep finished" in fleet.workers[0].log, what="a sweep")
            fleet.workers[0].restart()
            wait_until(lambda: fleet.workers[0].log.count("sweep finished") == 2, what="another sweep")
            seaweed.copy(str(fleet.settings["storage_url"]), copied)
        restored = {"database_url": postgres.restore(dumped), "storage_url": copied, **settings}
        second = Fleet(tmp_path / "restored", restored, seaweed.environment)
        try:
            for role in ("api", "worker"):
                second.begin(role)
            for node in second.nodes:
                node.await_ready()
            client = second.apis[0].client(account)
            before = client.batches.retrieve(batch.id)
            assert before.status == "in_progress"
            assert 0 < counts_of(before)[1] < _LINES
            ended = await_end(client, batch.id)
            assert ended.status == "completed"
            results_of(client, ended, lines)
        finally:
            second.end()
