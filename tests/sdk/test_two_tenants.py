"""Two tenants at once, against a small model of what each of them may see: A8, B5, B6, B7, C8, C9, C10, C12.

A step is one call of each tenant, sent at the same time. After it, each tenant sees exactly what its model has.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.support.postgres_server import Postgres
from tests.support.service import (
    CHAT,
    FORM,
    PATIENCE,
    Account,
    Reply,
    Service,
    call,
    chat_lines,
    credentials_of,
    running_mock,
    running_service,
    upload_form,
)

_TERMINAL = {"completed", "failed", "expired", "cancelled"}
_PROMPTS = ("hello", "[[status=400]]", "[[status=503 times=1]]", "[[delay=0.2]]")

Action = tuple[str, int, int]
"""The name of a call, which of the tenant's things it is about, and a number that the call uses otherwise."""


@dataclass
class _Batch:
    """What the model knows of a batch."""

    lines: int
    cancelled: bool = False
    ended: dict[str, Any] | None = None


@dataclass
class _Model:
    """What one tenant has."""

    account: Account
    files: dict[str, bytes] = field(default_factory=dict)
    deleted: set[str] = field(default_factory=set)
    batches: dict[str, _Batch] = field(default_factory=dict)


class Tenant:
    """One tenant: sends calls, and compares each answer with the model."""

    def __init__(self, service: Service, account: Account) -> None:
        self._service = service
        self.model = _Model(account)

    def call(
        self, method: str, path: str, *, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Reply:
        credentials = credentials_of(self.model.account)
        return call(self._service.port, method, path, body=body, headers=credentials | (headers or {}))

    def act(self, action: Action, other: "Tenant") -> None:
        name, which, number = action
        getattr(self, f"_{name}")(which, number, other)

    def _upload(self, which: int, number: int, _other: "Tenant") -> None:
        data = chat_lines(f"{_PROMPTS[which % len(_PROMPTS)]} {n}" for n in range(1 + number % 4))
        reply = self.call("POST", "/v1/files", body=upload_form(data), headers=FORM)
        assert reply.status == 200, reply
        assert reply.json["bytes"] == len(data)
        self.model.files[reply.json["id"]] = data

    def _create(self, which: int, number: int, other: "Tenant") -> None:
        """Create a batch of an own file, of the other tenant's, or of one that was deleted."""
        mine = list(self.model.files)
        places = [mine, mine, mine, list(other.model.files), sorted(self.model.deleted)]
        file_id = _pick(places[number % len(places)], which) or "file-unknown"
        body = json.dumps({"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}).encode()
        reply = self.call("POST", "/v1/batches", body=body)
        if file_id not in self.model.files:
            assert reply.status == 404, reply
            return
        assert reply.status == 200, reply
        self.model.batches[reply.json["id"]] = _Batch(self.model.files[file_id].count(b"\n"))

    def _cancel(self, which: int, _number: int, _other: "Tenant") -> None:
        if (batch_id := _pick(list(self.model.batches), which)) is None:
            return
        reply = self.call("POST", f"/v1/batches/{batch_id}/cancel")
        assert reply.status in (200, 409), reply
        if reply.status == 200:
            self.model.batches[batch_id].cancelled = True
        else:
            assert self._seen(batch_id)["status"] in _TERMINAL

    def _delete(self, which: int, _number: int, _other: "Tenant") -> None:
        if (file_id := _pick(list(self.model.files), which)) is None:
            return
        assert self.call("DELETE", f"/v1/files/{file_id}").json == {"id": file_id, "object": "file", "deleted": True}
        del self.model.files[file_id]
        self.model.deleted.add(file_id)
        assert self.call("GET", f"/v1/files/{file_id}/content").status == 404
        assert self.call("DELETE", f"/v1/files/{file_id}").status == 404

    def _content(self, which: int, number: int, _other: "Tenant") -> None:
        if (file_id := _pick(list(self.model.files), which)) is None:
            return
        data = self.model.files[file_id]
        assert self.call("GET", f"/v1/files/{file_id}/content").body == data
        start = number % len(data)
        part = self.call("GET", f"/v1/files/{file_id}/content", headers={"range": f"bytes={start}-"})
        assert (part.status, part.body) == (206, data[start:])

    def _trespass(self, which: int, number: int, other: "Tenant") -> None:
        """Ask for something of the other tenant: the answer is the one for something that does not exist."""
        file_id, batch_id = _pick(list(other.model.files), which), _pick(list(other.model.batches), which)
        calls = [("GET", "/v1/files/{}", file_id), ("GET", "/v1/files/{}/content", file_id)]
        calls += [("DELETE", "/v1/files/{}", file_id), ("GET", "/v1/batches/{}", batch_id)]
        calls += [("POST", "/v1/batches/{}/cancel", batch_id), ("GET", "/v1/batches/{}/progress", batch_id)]
        method, path, thing = calls[number % len(calls)]
        if thing is None:
            return
        unknown = thing[:-1] + ("0" if thing[-1] != "0" else "1")
        theirs, nothing = (self.call(method, path.format(each)) for each in (thing, unknown))
        assert theirs.status == nothing.status == 404
        assert theirs.body.replace(thing.encode(), b"ID") == nothing.body.replace(unknown.encode(), b"ID")

    def _finish(self, which: int, _number: int, _other: "Tenant") -> None:
        if (batch_id := _pick(list(self.model.batches), which)) is not None:
            self.await_end(batch_id)

    def await_end(self, batch_id: str) -> None:
        give_up = time.monotonic() + PATIENCE
        while (seen := self._seen(batch_id))["status"] not in _TERMINAL:
            assert time.monotonic() < give_up, seen
            time.sleep(0.02)
        batch = self.model.batches[batch_id]
        assert seen["status"] == "cancelled" if batch.cancelled else seen["status"] == "completed", seen
        assert batch.ended in (None, seen), "a batch changed after its end"
        batch.ended = seen
        self._check_results(batch, seen)

    def _check_results(self, batch: _Batch, seen: dict[str, Any]) -> None:
        """Every line is in one of the two files, once."""
        found: list[str] = []
        for name in ("output_file_id", "error_file_id"):
            if seen[name] is not None:
                reply = self.call("GET", f"/v1/files/{seen[name]}/content")
                assert reply.status == 200
                found += [json.loads(line)["custom_id"] for line in reply.body.splitlines()]
        assert sorted(found) == sorted(f"line-{n}" for n in range(batch.lines))

    def _seen(self, batch_id: str) -> dict[str, Any]:
        seen: dict[str, Any] = self.call("GET", f"/v1/batches/{batch_id}").json
        counts = seen["request_counts"]
        assert counts["completed"] + counts["failed"] <= counts["total"] == self.model.batches[batch_id].lines
        return seen

    def check_lists(self) -> None:
        """Both lists have everything that is there, newest first, and nothing else, however they are paged."""
        assert self._pages("/v1/files?purpose=batch&limit=3") == list(reversed(self.model.files))
        assert self._pages("/v1/batches?limit=3") == list(reversed(self.model.batches))

    def _pages(self, path: str) -> list[str]:
        found: list[str] = []
        more = True
        while more:
            after = f"&after={found[-1]}" if found else ""
            page = self.call("GET", path + after).json
            found += [each["id"] for each in page["data"]]
            more = page["has_more"]
        return found


def _pick(things: list[str], which: int) -> str | None:
    return things[which % len(things)] if things else None


_NAMES = ["upload", "upload", "create", "create", "cancel", "delete", "content", "trespass", "trespass", "finish"]
_ACTIONS = st.tuples(st.sampled_from(_NAMES), st.integers(0, 50), st.integers(0, 50))


class TwoTenants(RuleBasedStateMachine):
    """The steps of both tenants. A subclass binds the service."""

    service: Service
    threads: ThreadPoolExecutor
    runs = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).runs += 1
        accounts = [self.service.new_account(f"{side}-{self.runs}") for side in ("left", "right")]
        self._left, self._right = (Tenant(self.service, account) for account in accounts)

    @rule(left=_ACTIONS, right=_ACTIONS)
    def both_act(self, left: Action, right: Action) -> None:
        running = [
            self.threads.submit(self._left.act, left, self._right),
            self.threads.submit(self._right.act, right, self._left),
        ]
        for each in running:
            each.result(PATIENCE)

    @invariant()
    def each_sees_its_own(self) -> None:
        self._left.check_lists()
        self._right.check_lists()

    def teardown(self) -> None:
        for tenant in (self._left, self._right):
            for batch_id in tenant.model.batches:
                tenant.await_end(batch_id)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.proof)])
def service(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Service]:
    shared: dict[str, Any] = {}
    if request.param == "postgres":
        server: Postgres = request.getfixturevalue("postgres")
        shared["database_url"] = server.new_database()
    with running_mock() as mock, running_service(tmp_path, mock.url, retry_base_seconds=0.01, **shared) as running:
        yield running


def _run(service: Service, *, examples: int, steps: int) -> None:
    with ThreadPoolExecutor(2) as threads:
        machine = type("Bound", (TwoTenants,), {"service": service, "threads": threads})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(HealthCheck),
            ),
        )
        print(f"{vars(machine)['runs']} runs of up to {steps} steps of both tenants")


@pytest.mark.rule("A8", "Two tenants that act at the same time see only their own files, batches and results.")
def test_each_tenant_sees_exactly_its_own(service: Service) -> None:
    _run(service, examples=4, steps=12)


@pytest.mark.proof
def test_each_tenant_sees_exactly_its_own_for_long(service: Service) -> None:
    """A8: the same, for longer."""
    _run(service, examples=60, steps=40)
