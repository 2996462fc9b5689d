"""Data of every earlier version: this version opens it, migrates it and finishes what was begun.

The fixtures hold rows in every state, as a killed service of that version left them.
"""

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import asyncpg  # type: ignore[import-untyped]
import pytest
from openai import NotFoundError, OpenAI, PermissionDeniedError

from tests.support.postgres_server import Postgres
from tests.support.service import (
    Service,
    await_end,
    chat_lines,
    counts_of,
    results_of,
    running_mock,
)
from tests.support.upgrade_fixture import ExpectedBatch, Fixture, versions

_STATES = {
    "SELECT DISTINCT state FROM files": {"uploading", "stored", "deleted", "expired", "abandoned"},
    "SELECT DISTINCT status FROM batches": {
        *("validating", "in_progress", "finalizing", "cancelling"),
        *("completed", "failed", "expired", "cancelled"),
    },
    "SELECT DISTINCT state FROM shards": {"open", "leased", "done", "closed"},
    "SELECT DISTINCT min(strikes, 1) FROM shards": {0, 1},
    "SELECT DISTINCT object_key IS NULL FROM segments": {False, True},
    "SELECT DISTINCT revoked_at IS NULL FROM keys": {False, True},
    "SELECT DISTINCT stop FROM batches WHERE status = 'in_progress'": {None, "expired"},
    "SELECT DISTINCT drained > 0 FROM batches WHERE status = 'in_progress'": {False, True},
    "SELECT DISTINCT work_key IS NULL FROM batches WHERE status = 'completed'": {False, True},
    "SELECT DISTINCT kind FROM ledger": {"grant", "usage"},
    **{
        f"SELECT count(*) > 0 FROM {table}": {True}
        for table in ("lanes", "line_errors", "samples", "processes", "metering")
    },
}


class Upgraded:
    """A copy of a fixture, and the means to look at it and to run this version on it."""

    def __init__(self, fixture: Fixture, data_dir: Path, url: str | None) -> None:
        self.fixture, self._data_dir, self._url = fixture, data_dir, url
        data_dir.mkdir()
        fixture.copy_objects(data_dir)
        if url is None:
            fixture.load_sqlite(data_dir)
        else:
            fixture.load_postgres(url)

    def column(self, sql: str) -> set[Any]:
        """Return the first column of a query."""
        if self._url is not None:
            return asyncio.run(_column(self._url, sql.replace("min(", "least(").replace("drained > 0", "drained")))
        with closing(sqlite3.connect(self._data_dir / "batchline.sqlite")) as connection:
            return {row[0] for row in connection.execute(sql)}

    @contextmanager
    def served(self, upstream_url: str) -> Iterator[Service]:
        settings: dict[str, object] = {"upstream_url": upstream_url, "metering": "on", "lease_seconds": 2}
        if self._url is not None:
            settings["database_url"] = self._url
        account = self.fixture.expected["accounts"]["alpha"]
        service = Service(self._data_dir, ("-m", "batchline", "serve"), settings, account=account)
        try:
            service.start()
            service.await_ready()
            yield service
        finally:
            service.end()


async def _column(url: str, sql: str) -> set[Any]:
    connection = await asyncpg.connect(url)
    try:
        return {row[0] for row in await connection.fetch(sql)}
    finally:
        await connection.close()


@pytest.fixture(params=["sqlite", "postgres"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=versions())
def old(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> Upgraded:
    url = None
    if kind == "postgres":
        postgres: Postgres = request.getfixturevalue("postgres")
        url = postgres.new_database(empty=True)
    return Upgraded(Fixture(request.param, kind), tmp_path / "data", url)


def test_a_fixture_has_rows_in_every_state(old: Upgraded) -> None:
    """If a state is missing, the test below proves nothing about it."""
    assert {sql: old.column(sql) for sql in _STATES} == _STATES


@pytest.mark.rule("C12", "After an upgrade every batch ends, with every line once.")
@pytest.mark.rule("D4", "An upgrade changes no money.")
def test_this_version_finishes_what_an_earlier_one_began(old: Upgraded) -> None:
    expected = old.fixture.expected
    money = old.column("SELECT sum(balance + credits) FROM organizations")
    with running_mock() as mock, old.served(mock.url) as service:
        client = service.client()
        assert {batch.id for batch in client.batches.list(limit=100)} == {batch["id"] for batch in expected["batches"]}
        for batch in expected["batches"]:
            _assert_ends(client, batch)
        _assert_files(client, expected["files"], expected["gone"])
        _assert_keys(service, expected["accounts"])
        organizations = json.loads(service.command("orgs", "list", "--json"))
        for organization in organizations:
            entries = json.loads(service.command("orgs", "ledger", organization["organization_id"], "--json"))
            for part in ("balance_nano", "credits_nano"):
                assert sum(entry[part] for entry in entries) == organization[part]
        assert {sum(each["balance_nano"] + each["credits_nano"] for each in organizations)} == {int(*money)}
        assert service.call("GET", "/readyz").json["migrations"] == "ok"
    assert "Traceback" not in service.log


def _assert_ends(client: OpenAI, expected: ExpectedBatch) -> None:
    batch = await_end(client, expected["id"])
    assert (expected["name"], batch.status) == (expected["name"], expected["ends"])
    if batch.status == "failed":
        assert batch.errors is not None
        assert counts_of(batch) == (0, 0, 0)
        return
    assert counts_of(batch)[0] == expected["lines"]
    results = results_of(client, batch, chat_lines(["x"] * expected["lines"]))
    codes = {record["error"]["code"] for record in results.values() if record["error"]}
    assert codes <= {"invalid_request_error", "not_found_error", f"batch_{batch.status}", "authentication_error"}
    if expected["name"] == "revoked key":
        assert codes == {"authentication_error"}
    if expected["name"] in {"open", "struck", "drained", "finalizing"}:
        assert codes == set()


def _assert_files(client: OpenAI, files: dict[str, dict[str, str]], gone: list[str]) -> None:
    for file_id, file in files.items():
        assert client.files.retrieve(file_id).filename == file["filename"]
        assert sha256(client.files.content(file_id).content).hexdigest() == file["sha256"]
    for file_id in gone:
        with pytest.raises(NotFoundError):
            client.files.content(file_id)


def _assert_keys(service: Service, accounts: dict[str, dict[str, str]]) -> None:
    for name, account in accounts.items():
        if name.startswith("revoked"):
            with pytest.raises(PermissionDeniedError):
                service.client(account).files.list()
        else:
            service.client(account).files.list()
