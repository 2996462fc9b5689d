"""What several workers do in the background, each thing once: SPEC C11 to C13, B4, B8."""

from pathlib import Path

import pytest

from tests.support.fleet import running_fleet
from tests.support.postgres_server import Postgres
from tests.support.s3_server import Seaweed
from tests.support.service import await_end, chat_lines, results_of, running_mock, submit, wait_until

pytestmark = pytest.mark.proof

_BATCHES = 30
_WINDOW = 4


def test_each_batch_ends_once_and_leaves_nothing(tmp_path: Path, postgres: Postgres, seaweed: Seaweed) -> None:
    """C12, C13, B8: two workers finish many batches and expire some, each once, as their logs say together; when the
    files are deleted, the bucket is empty."""
    with (
        running_mock() as mock,
        running_fleet(
            tmp_path,
            *("api", "worker", "worker"),
            postgres=postgres,
            seaweed=seaweed,
            upstream_url=mock.url,
            completion_window_seconds=_WINDOW,
            lease_seconds=3,
            max_concurrency=60,
            work_retention_seconds=0,
        ) as fleet,
    ):
        client = fleet.client()
        quick = [chat_lines(f"[[huge=5000]] batch {b} line {n}" for n in range(40)) for b in range(_BATCHES)]
        slow = [chat_lines(f"[[delay=0.5]] slow {b} {n}" for n in range(2000)) for b in range(2)]
        batches = [(submit(client, lines).id, lines) for lines in (*quick, *slow)]
        ended = [await_end(client, batch_id) for batch_id, _ in batches]
        assert [batch.status for batch in ended] == ["completed"] * _BATCHES + ["expired"] * 2
        for batch, (_, lines) in zip(ended, batches, strict=True):
            results_of(client, batch, lines)
        logs = "".join(worker.log for worker in fleet.workers)
        for batch in ended:
            assert logs.count(f'msg="batch finished" batch={batch.id}') == 1
            assert logs.count(f'msg="batch expired, its remaining lines will not run" batch={batch.id}') == (
                batch.status == "expired"
            )
        listed = [file.id for file in client.files.list()]
        files = [id for batch in ended for id in (batch.output_file_id, batch.error_file_id) if id]
        assert sorted(listed) == sorted(files + [batch.input_file_id for batch in ended])
        for file_id in listed:
            client.files.delete(file_id)
        wait_until(lambda: _left(seaweed, str(fleet.settings["storage_url"])) == [], what="an empty bucket")


def _left(seaweed: Seaweed, url: str) -> list[str]:
    """Return the keys of all objects but the marker of the database that they belong to."""
    return [key for key in seaweed.keys(url) if "/identity/" not in key]
