"""Readers of results across `kill -9` of the service: rule G2."""

import json
import os
import subprocess
import sys
from http.client import HTTPConnection
from pathlib import Path

import pytest

from batchline.cli.connection.credentials import local_credentials
from batchline.cli.loading import load_settings
from tests.support.result_readers import Follower, Pager, Reader, await_lines
from tests.support.service import chat_lines, results_of, running_mock, running_service, submit, wait_until


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


@pytest.mark.rule("G2", "The command that follows results prints every line once across kill -9 of the service.")
@pytest.mark.parametrize(
    ("lines", "kills"), [(600, 2), pytest.param(50_000, 3, marks=pytest.mark.proof)], ids=["few", "many"]
)
def test_the_command_prints_every_line_once_across_kills(tmp_path: Path, lines: int, kills: int) -> None:
    """Its processor time for each line is printed."""
    concurrency, delay = (8, 0.05) if lines < 1000 else (256, 0.02)
    printed = tmp_path / "printed.jsonl"
    with (
        running_mock(delay=delay) as mock,
        running_service(tmp_path, mock.url, max_concurrency=concurrency) as service,
    ):
        # Without a server the command finds the service of the folder, also if it listens on another port.
        credentials = local_credentials(load_settings(data_dir=str(service.data_dir)))
        account = {"api_key": credentials.api_key, "project_id": credentials.project_id}
        data = chat_lines(f"{'[[status=400]]' if n % 5 == 0 else ''} {n}" for n in range(lines))
        batch_id = submit(service.client(account), data).id
        command = [sys.executable, "-m", "batchline", "results", batch_id, "--follow"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BATCHLINE_")}
        with printed.open("wb") as stdout, (tmp_path / "stderr").open("wb") as stderr:
            reader = subprocess.Popen(
                [*command, "--data-dir", str(service.data_dir)], stdout=stdout, stderr=stderr, env=environment
            )
        for kill in range(1, kills + 1):
            wanted = lines * kill // (kills + 2)
            wait_until(lambda wanted=wanted: _count_lines(printed) >= wanted, what="printed lines")  # type: ignore[misc]
            service.kill()
            service.restart()
        _, status, used = os.wait4(reader.pid, 0)
        reader.returncode = os.waitstatus_to_exitcode(status)
        assert reader.returncode == 0, (tmp_path / "stderr").read_text()
        client = service.client(account, max_retries=2)
        records = results_of(client, client.batches.retrieve(batch_id), data)
    expected = sorted(json.dumps(record, sort_keys=True) for record in records.values())
    found = [json.dumps(json.loads(line), sort_keys=True) for line in printed.read_bytes().splitlines()]
    assert sorted(found) == expected
    cpu = used.ru_utime + used.ru_stime
    print(f"\n{lines} lines followed across {kills} kills: {cpu:.2f} s of CPU, {cpu / lines * 1e6:.0f} us a line")


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")
