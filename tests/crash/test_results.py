"""Readers of results across `kill -9` of the service: rule G2."""

import http.client
import json
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.support.service import Service, chat_lines, results_of, running_mock, running_service, submit, wait_until

_BROKEN = (OSError, http.client.HTTPException, ValueError)
"""How a request ends whose service is killed; a body that is cut off is no JSON."""


class _Reader(Thread):
    """Reads results until their end, and goes on behind the last line that it got whenever the service dies."""

    def __init__(self, service: Service, batch_id: str) -> None:
        super().__init__(daemon=True)
        self._service, self._path = service, f"/v1/batches/{batch_id}/results"
        self.lines: list[bytes] = []
        self.cursor: str | None = None
        self.breaks = 0

    def run(self) -> None:
        ended = False
        while not ended:
            try:
                ended = self._read()
            except _BROKEN:
                self.breaks += 1
                wait_until(self._service.is_ready, what="the service is back")

    def _read(self) -> bool:
        raise NotImplementedError


class _Pager(_Reader):
    def _read(self) -> bool:
        after = f"&after={self.cursor}" if self.cursor else ""
        page = self._service.call("GET", f"{self._path}?limit=17{after}").json
        self.lines += [json.dumps(item, sort_keys=True).encode() for item in page["data"]]
        self.cursor = page["last_id"] or self.cursor
        return not page["has_more"]


class _Follower(_Reader):
    def _read(self) -> bool:
        resumed = {"last-event-id": self.cursor} if self.cursor else {}
        connection = http.client.HTTPConnection("127.0.0.1", self._service.port, timeout=60)
        try:
            headers = self._service.credentials | {"accept": "text/event-stream"} | resumed
            connection.request("GET", self._path, headers=headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            return self._follow(response)
        finally:
            connection.close()

    def _follow(self, response: http.client.HTTPResponse) -> bool:
        event: dict[bytes, bytes] = {}
        for line in response:
            if line.strip():
                name, _, value = line.strip().partition(b": ")
                event[name] = value
            elif event.get(b"event") == b"line":
                self.lines.append(json.dumps(json.loads(event[b"data"]), sort_keys=True).encode())
                self.cursor = event[b"id"].decode()
            elif event.get(b"event") == b"end":
                return True
            event = {} if not line.strip() else event
        return False


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
        readers: list[_Reader] = [kind(service, batch_id) for kind in (_Pager, _Follower)]
        for reader in readers:
            reader.start()
        for kill in range(1, kills + 1):
            _wait(readers, lambda reader, at_least=lines * kill // (kills + 2): len(reader.lines) >= at_least)
            service.kill()
            service.restart()
        for reader in readers:
            reader.join()
        assert sum(reader.breaks for reader in readers) >= kills
        client = service.client(max_retries=2)
        ended: Any = client.batches.retrieve(batch_id)
        records = results_of(client, ended, data)
        expected = sorted(json.dumps(record, sort_keys=True).encode() for record in records.values())
        for reader in readers:
            assert sorted(reader.lines) == expected
        assert readers[0].lines == readers[1].lines


def _wait(readers: list[_Reader], met: Callable[[_Reader], bool]) -> None:
    wait_until(lambda: all(met(reader) for reader in readers), what="the readers are that far")
