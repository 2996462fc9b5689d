"""Readers of results across `kill -9` of the service: rule G2."""

import json
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.support.result_readers import Follower, Pager, Reader, await_lines
from tests.support.service import chat_lines, results_of, running_mock, running_service, submit


@pytest.mark.rule("G2", "A reader gets every line once, in one order, across kill -9 of the service.")
@pytest.mark.parametrize(
    ("lines", "kills", "delay"), [(200, 2, 0.1), pytest.param(50_000, 3, 0.02, marks=pytest.mark.proof)]
)
def test_readers_get_every_line_once_across_kills(tmp_path: Path, lines: int, kills: int, delay: float) -> None:
    concurrency = 8 if lines < 1000 else 256
    with (
        running_mock(delay=delay) as mock,
        running_service(tmp_path, mock.url, max_concurrency=concurrency) as service,
    ):
        data = chat_lines(f"{'[[status=400]]' if n % 5 == 0 else ''} {n}" for n in range(lines))
        batch_id = submit(service.client(), data).id
        readers: list[Reader] = [kind(service, batch_id) for kind in (Pager, Follower)]
        for reader in readers:
            reader.start()
        for kill in range(1, kills + 1):
            at_least = lines * kill // (kills + 2)
            await_lines(readers, at_least)
            service.kill()
            service.restart()
        for reader in readers:
            reader.join()
        assert sum(reader.breaks for reader in readers) >= kills
        client = service.client(max_retries=2)
        records = results_of(client, client.batches.retrieve(batch_id), data)
        expected = sorted(json.dumps(record, sort_keys=True).encode() for record in records.values())
        for reader in readers:
            assert sorted(reader.lines) == expected
        assert readers[0].lines == readers[1].lines


@pytest.mark.rule("G2", "A stream does not hold up the end of the service: it ends at once, without end.")
def test_a_stream_does_not_hold_up_the_end_of_the_service(tmp_path: Path) -> None:
    with running_service(tmp_path, "http://127.0.0.1:1/v1", shutdown_grace_seconds=3600) as service:
        batch_id = submit(service.client(), chat_lines(["waits"])).id
        connection = HTTPConnection("127.0.0.1", service.port, timeout=60)
        headers = service.credentials | {"accept": "text/event-stream"}
        connection.request("GET", f"/v1/batches/{batch_id}/results", headers=headers)
        response = connection.getresponse()
        assert response.readline() == b"event: batch\n"
        assert service.terminate() == 0
        assert b"event: end" not in response.read()
        connection.close()
