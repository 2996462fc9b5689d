"""Several processes of the service on one PostgreSQL and one bucket."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import openai
from openai import OpenAI
from openai.types import Batch

from tests.support.postgres_server import Postgres
from tests.support.s3_server import Seaweed
from tests.support.service import PATIENCE, Service, call, counts_of, wait_until

_TERMINAL = frozenset({"completed", "failed", "expired", "cancelled"})
AWAY = (openai.APIConnectionError, openai.InternalServerError)
"""What a client meets while a node, the database or the bucket is gone."""

_BETWEEN_LOOKS = 0.05


class Fleet:
    """Nodes by role, in the order in which they were added; each has a folder of its own."""

    def __init__(self, folder: Path, settings: dict[str, object], environment: Mapping[str, str]) -> None:
        self._folder, self._environment = folder, environment
        self.settings = settings
        self._nodes: list[tuple[str, Service]] = []

    @property
    def apis(self) -> list[Service]:
        return self._of_role("api")

    @property
    def workers(self) -> list[Service]:
        return self._of_role("worker")

    @property
    def nodes(self) -> list[Service]:
        return [node for _, node in self._nodes]

    def client(self, api: int = 0) -> OpenAI:
        return self.apis[api].client()

    def begin(self, role: str) -> Service:
        """Another node, that is not waited for."""
        node = Service(
            self._folder / f"{role}-{len(self._nodes)}",
            ("-m", "batchline", role),
            self.settings,
            account=self.nodes[0].account if self._nodes else None,
            environment=self._environment,
        )
        self._nodes.append((role, node))
        node.start()
        return node

    def add(self, role: str) -> Service:
        node = self.begin(role)
        node.await_ready()
        return node

    def remove(self, node: Service) -> None:
        """It is over, and counts no more."""
        node.end()
        self._nodes = [(role, known) for role, known in self._nodes if known is not node]

    def end(self) -> None:
        for node in self.nodes:
            node.end()

    def _of_role(self, wanted: str) -> list[Service]:
        return [node for role, node in self._nodes if role == wanted]


@contextmanager
def running_fleet(
    folder: Path,
    *roles: str,
    postgres: Postgres,
    seaweed: Seaweed,
    environment: Mapping[str, str] | None = None,
    **settings: object,
) -> Iterator[Fleet]:
    """On a new database and an empty part of the bucket."""
    shared = {"database_url": postgres.new_database(), "storage_url": seaweed.new_url()}
    fleet = Fleet(folder, shared | settings, seaweed.environment | dict(environment or {}))
    try:
        for role in roles:
            fleet.begin(role)
        for node in fleet.nodes:
            node.await_ready()
        yield fleet
    finally:
        fleet.end()


def progress_of(node: Service, batch_id: str) -> Any:
    return node.call("GET", f"/v1/batches/{batch_id}/progress").json


def metric(node: Service, name: str) -> float:
    """Summed over its labels."""
    text = call(node.port, "GET", "/metrics", headers={}).body.decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


class Watch:
    """Looks at batches all the time through whichever API node is there. What may never happen is told at the end:
    that a count falls, or that a batch leaves a terminal state (C11, C12)."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._last: dict[str, Batch | None] = {}
        self._over = Event()
        self._wrong: list[str] = []
        self._thread = Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE)

    def add(self, batch_id: str) -> None:
        self._last[batch_id] = None

    @property
    def done(self) -> int:
        """Lines of all batches that were seen to be counted."""
        return sum(sum(counts_of(batch)[1:]) for batch in self._last.values() if batch is not None)

    def await_progress(self) -> None:
        """Until more lines are counted, or nothing is left to count."""
        done = self.done
        wait_until(lambda: self.done > done or self.all_over(), what="progress")

    def all_over(self) -> bool:
        assert not self._wrong, self._wrong
        return all(batch is not None and batch.status in _TERMINAL for batch in self._last.values())

    def batch(self, batch_id: str) -> Batch:
        """As it was seen last."""
        batch = self._last[batch_id]
        assert batch is not None
        return batch

    def _look(self) -> None:
        while not self._over.wait(_BETWEEN_LOOKS):
            for batch_id in list(self._last):
                for api in self._fleet.apis:
                    try:
                        self._see(api.client().batches.retrieve(batch_id, timeout=5))
                    except AWAY:
                        continue

    def _see(self, batch: Batch) -> None:
        last = self._last[batch.id]
        self._last[batch.id] = batch
        if last is None:
            return
        if any(now < before for now, before in zip(counts_of(batch), counts_of(last), strict=True)):
            self._wrong.append(f"{counts_of(last)} became {counts_of(batch)}")
        if last.status in _TERMINAL and batch != last:
            self._wrong.append(f"{last} became {batch}")
