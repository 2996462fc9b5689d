"""Reads the results of a batch from a service that may die, to their end."""

import http.client
import json
import time
from collections.abc import Sequence
from threading import Thread

from tests.support.service import Service, wait_until

_BROKEN = (OSError, http.client.HTTPException, ValueError)
"""How a request ends whose service is killed; a body that is cut off is no JSON."""
_PAUSE_SECONDS = 0.05
"""How long a reader of pages waits after an empty page. Without a pause it would keep a whole core busy."""


class Reader(Thread):
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


class Pager(Reader):
    """Reads pages."""

    def _read(self) -> bool:
        after = f"&after={self.cursor}" if self.cursor else ""
        page = self._service.call("GET", f"{self._path}?limit=17{after}").json
        self.lines += [json.dumps(item, sort_keys=True).encode() for item in page["data"]]
        self.cursor = page["last_id"] or self.cursor
        if not page["data"]:
            time.sleep(_PAUSE_SECONDS)
        return not page["has_more"]


class Follower(Reader):
    """Reads server-sent events."""

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


def await_lines(readers: Sequence[Reader], lines: int) -> None:
    """Wait until all readers have so many lines."""
    wait_until(lambda: min(len(reader.lines) for reader in readers) >= lines, what=f"{lines} lines read")
