"""Runs several processes of the service on one PostgreSQL and one bucket."""

import re
from collections.abc import Iterator, Mapping, Sequence
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
UNAVAILABLE_ERRORS = (openai.APIConnectionError, openai.InternalServerError)
"""The errors of a client while a node, the database or the bucket is unavailable."""

_POLL_SECONDS = 0.05


class Fleet:
    """Nodes by role, in the order in which they were added. Each has its own folder."""

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

    def begin(self, role: str, *, command: Sequence[str] | None = None) -> Service:
        """Start another node, by another command if one is given, and do not wait until it is ready."""
        node = Service(
            self._folder / f"{role}-{len(self._nodes)}",
            command or ("-m", "batchline", role),
            self.settings,
            account=self.nodes[0].account if self._nodes else None,
            environment=self._environment,
        )
        self._nodes.append((role, node))
        node.start()
        return node

    def add(self, role: str, *, command: Sequence[str] | None = None) -> Service:
        node = self.begin(role, command=command)
        node.await_ready()
        return node

    def remove(self, node: Service) -> None:
        """End the node, and count it no more."""
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
    """Run nodes of these roles on a new database and an empty prefix of the bucket."""
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
    """Return the value of a metric, summed over its labels."""
    text = call(node.port, "GET", "/metrics", headers={}).body.decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


class Watch:
    """Polls batches through every API node that answers.

    ``all_ended`` fails if a count fell or a batch left a terminal state, which may never happen (C11, C12).
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._last: dict[str, Batch | None] = {}
        self._closing = Event()
        self._violations: list[str] = []
        self._thread = Thread(target=self._poll, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._thread.join(PATIENCE)

    def add(self, batch_id: str) -> None:
        self._last[batch_id] = None

    @property
    def done(self) -> int:
        """The number of lines of all batches that were counted when last seen."""
        return sum(sum(counts_of(batch)[1:]) for batch in self._last.values() if batch is not None)

    def await_progress(self) -> None:
        """Wait until more lines are counted, or all batches have ended."""
        done = self.done
        wait_until(lambda: self.done > done or self.all_ended(), what="progress")

    def all_ended(self) -> bool:
        assert not self._violations, self._violations
        return all(batch is not None and batch.status in _TERMINAL for batch in self._last.values())

    def batch(self, batch_id: str) -> Batch:
        """Return the batch as it was last seen."""
        batch = self._last[batch_id]
        assert batch is not None
        return batch

    def _poll(self) -> None:
        while not self._closing.wait(_POLL_SECONDS):
            for batch_id in list(self._last):
                for api in self._fleet.apis:
                    try:
                        self._check(api.client().batches.retrieve(batch_id, timeout=5))
                    except UNAVAILABLE_ERRORS:
                        continue

    def _check(self, batch: Batch) -> None:
        last = self._last[batch.id]
        self._last[batch.id] = batch
        if last is None:
            return
        if any(now < before for now, before in zip(counts_of(batch), counts_of(last), strict=True)):
            self._violations.append(f"{counts_of(last)} became {counts_of(batch)}")
        if last.status in _TERMINAL and batch != last:
            self._violations.append(f"{last} became {batch}")
