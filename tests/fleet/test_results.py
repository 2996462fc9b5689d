"""Readers of results on the nodes of a fleet whose workers are killed: rule G2."""

import json
from pathlib import Path

import pytest

from tests.support.fleet import running_fleet
from tests.support.postgres_server import Postgres
from tests.support.result_readers import Follower, Pager, Reader, await_lines
from tests.support.s3_server import Seaweed
from tests.support.service import chat_lines, results_of, running_mock, submit


@pytest.mark.rule(
    "G2", "Readers on all nodes get every line once, in one order, while workers die and others take over."
)
def test_readers_on_every_node_see_one_order(tmp_path: Path, postgres: Postgres, seaweed: Seaweed) -> None:
    roles = ("api", "api", "worker", "worker")
    with (
        running_mock(delay=0.1) as mock,
        running_fleet(
            tmp_path,
            *roles,
            postgres=postgres,
            seaweed=seaweed,
            upstream_url=mock.url,
            lease_seconds=3,
            max_concurrency=8,
        ) as fleet,
    ):
        data = chat_lines(f"{'[[status=400]]' if n % 5 == 0 else ''} {n}" for n in range(400))
        batch_id = submit(fleet.client(), data).id
        readers: list[Reader] = [kind(node, batch_id) for kind in (Pager, Follower) for node in fleet.apis]
        for reader in readers:
            reader.start()
        for worker, at_least in zip(fleet.workers, (80, 200), strict=True):
            await_lines(readers, at_least)
            worker.kill()
            worker.start()
        for reader in readers:
            reader.join()
        client = fleet.apis[0].client(max_retries=2)
        records = results_of(client, client.batches.retrieve(batch_id), data)
        expected = sorted(json.dumps(record, sort_keys=True).encode() for record in records.values())
        assert sorted(readers[0].lines) == expected
        assert all(reader.lines == readers[0].lines for reader in readers)
