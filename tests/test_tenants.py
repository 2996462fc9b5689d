"""Objects of one tenant do not exist for another, byte for byte: A2, A8, A11, A13, D6, E3, F5.

There are three projects: the owner's, which has everything; a sibling's in the same organization; and a stranger's in
another organization, with the same name as the owner's.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import Mock
from uuid import uuid4

import pytest
from click.testing import CliRunner

from batchline.api.server import build
from batchline.api.services import ApiServices
from batchline.cli import main
from batchline.settings import Settings
from tests.support.service import (
    CHAT,
    FORM,
    Account,
    Reply,
    Service,
    await_end,
    call,
    chat_line,
    chat_lines,
    credentials_of,
    results_of,
    running_mock,
    running_service,
    submit,
    upload_form,
    wait_until,
)

_PRIVATE, _ABSENT = "private-model", "missing-model"
_ADMIN = "the-administrators-own-token"
_IDEMPOTENCY = {"idempotency-key": "used by the owner"}
_RETRY = {"x-stainless-retry-count": "1"}
_SETTINGS = """
admin_token = "{admin}"

[models.m]

[models.{private}]
projects = ["{owner}"]
paths = ["/summary"]
"""

_FILE, _BATCH, _MODEL = "file", "batch", "model"


class _Probe(NamedTuple):
    """A request that names an object at ``ID``; ``status`` is the answer for an object that does not exist."""

    names: str
    path: str
    status: int = 404
    body: dict[str, Any] | None = None
    headers: Mapping[str, str] = MappingProxyType({})


_CREATE: dict[str, Any] = {"input_file_id": "ID", "endpoint": CHAT}
_SAID: dict[str, Any] = {"model": "ID", "messages": [{"role": "user", "content": "one"}]}
_TEXT: dict[str, Any] = {"model": "ID", "text": "one"}
_INPUT: dict[str, Any] = {"model": "ID", "input": "one"}
_CONTENT = "/v1/files/ID/content"

_WALK: dict[str, list[_Probe]] = {
    "GET /v1/files": [_Probe(_FILE, "/v1/files?after=ID", 400), _Probe(_FILE, "/v1/files?after=ID&order=asc", 400)],
    "POST /v1/files": [],
    "GET /v1/files/": [],
    "DELETE /v1/files/": [],
    "GET /v1/files/{file_id}": [_Probe(_FILE, "/v1/files/ID")],
    "DELETE /v1/files/{file_id}": [_Probe(_FILE, "/v1/files/ID")],
    "GET /v1/files//content": [],
    "GET /v1/files/{file_id}/content": [
        _Probe(_FILE, _CONTENT),
        _Probe(_FILE, _CONTENT, headers={"range": "bytes=0-3"}),
        _Probe(_FILE, _CONTENT, headers={"range": "bytes=99999999-"}),
    ],
    "GET /v1/batches": [
        _Probe(_BATCH, "/v1/batches?after=ID", 400),
        _Probe(_BATCH, "/v1/batches?after=ID&status=completed", 400),
    ],
    "POST /v1/batches": [
        _Probe(_FILE, "/v1/batches", body=_CREATE),
        _Probe(_FILE, "/v1/batches", body=_CREATE, headers=_IDEMPOTENCY),
        _Probe(_FILE, "/v1/batches", body=_CREATE, headers=_RETRY),
    ],
    "POST /v1/batches/check": [_Probe(_FILE, "/v1/batches/check", body=_CREATE)],
    "GET /v1/batches/": [],
    "GET /v1/batches/{batch_id}": [_Probe(_BATCH, "/v1/batches/ID")],
    "GET /v1/batches//progress": [],
    "GET /v1/batches/{batch_id}/progress": [_Probe(_BATCH, "/v1/batches/ID/progress")],
    "POST /v1/batches//cancel": [],
    "POST /v1/batches/{batch_id}/cancel": [_Probe(_BATCH, "/v1/batches/ID/cancel")],
    "POST /v1/batches//rerun": [],
    "POST /v1/batches/{batch_id}/rerun": [
        _Probe(_BATCH, "/v1/batches/ID/rerun", body={}),
        _Probe(_BATCH, "/v1/batches/ID/rerun", body={}, headers=_IDEMPOTENCY),
    ],
    "GET /v1/batches//results": [],
    "GET /v1/batches/{batch_id}/results": [
        _Probe(_BATCH, "/v1/batches/ID/results"),
        _Probe(_BATCH, "/v1/batches/ID/results?after=r1-0&status=failed"),
        _Probe(_BATCH, "/v1/batches/ID/results", headers={"accept": "text/event-stream"}),
    ],
    "GET /v1/batches//merged": [],
    "GET /v1/batches/{batch_id}/merged": [_Probe(_BATCH, "/v1/batches/ID/merged")],
    "POST /v1/batches//release": [],
    "POST /v1/batches/{batch_id}/release": [_Probe(_BATCH, "/v1/batches/ID/release")],
    "GET /v1/usage": [],
    "POST /v1/chat/completions": [_Probe(_MODEL, CHAT, body=said) for said in (_SAID, _SAID | {"stream": True})],
    "POST /v1/responses": [_Probe(_MODEL, "/v1/responses", body=said) for said in (_INPUT, _INPUT | {"stream": True})],
    "POST /summary": [_Probe(_MODEL, "/summary", body=_TEXT)],
    "POST /usecase/classify/iab": [_Probe(_MODEL, "/usecase/classify/iab", body=_TEXT)],
    "POST /gliner": [_Probe(_MODEL, "/gliner", body=_TEXT)],
    "GET /v1/models": [],
    "GET /v1/models/{model:path}": [_Probe(_MODEL, "/v1/models/ID")],
}
"""Every route that needs credentials, with every way to name an object on it. HEAD comes with GET."""

_OPEN = {"GET /healthz", "GET /readyz", "GET /metrics", "GET /openapi.json", "GET /docs", "GET /docs/{asset}"}
"""Routes without credentials."""


@dataclass(frozen=True)
class _Tenants:
    service: Service
    owner: Account
    sibling: Account
    stranger: Account
    revoked: Account
    """A revoked key of the owner's project."""

    def ask(self, account: Account, method: str, probe: _Probe, named: str) -> Reply:
        body = None if probe.body is None else json.dumps(probe.body).replace("ID", named).encode()
        path = probe.path.replace("ID", named)
        return call(self.service.port, method, path, body=body, headers=credentials_of(account) | dict(probe.headers))

    def get(self, account: Account, path: str) -> Reply:
        return call(self.service.port, "GET", path, headers=credentials_of(account))

    def upload(self, account: Account) -> str:
        headers = credentials_of(account) | FORM
        reply = call(self.service.port, "POST", "/v1/files", body=upload_form(chat_lines(["one"])), headers=headers)
        return str(reply.json["id"])

    def create(self, account: Account, file_id: str, headers: dict[str, str] | None = None) -> Reply:
        return self.ask(account, "POST", _Probe(_FILE, "/v1/batches", body=_CREATE, headers=headers or {}), file_id)

    def create_and_leave(self, account: Account, file_id: str) -> str:
        """Create a batch whose client never received the answer, as far as the service knows."""
        batch_id = str(self.create(account, file_id).json["id"])
        # The service marks the answer right after sending it; that must not happen after the update below.
        marked = "SELECT answered FROM batches WHERE id = ?"
        wait_until(lambda: self.in_database(marked, batch_id) == [(1,)], what="the answer is marked")
        self.in_database("UPDATE batches SET answered = 0 WHERE id = ?", batch_id)
        return batch_id

    def in_database(self, statement: str, *values: str) -> list[Any]:
        path = self.service.data_dir / "batchline.sqlite"
        with closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as database:
            return database.execute(statement, values).fetchall()


class _Objects(NamedTuple):
    """The owner's files and batches, by kind."""

    files: dict[str, str]
    batches: dict[str, str]

    def named(self, names: str) -> list[str]:
        """Return every id that a probe can name, with both spellings of file ids."""
        if names == _MODEL:
            return [_PRIVATE]
        if names == _BATCH:
            return list(self.batches.values())
        return [spelt for known in self.files.values() for spelt in (known, known.replace("file-", "file_"))]


@pytest.fixture(scope="module")
def tenants(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Tenants]:
    folder = tmp_path_factory.mktemp("tenants")
    places = [("first", "main"), ("first", "second"), ("second", "main"), ("first", "main")]
    owner, sibling, stranger, revoked = (_new_account(folder / "data", *place) for place in places)
    config = folder / "batchline.toml"
    config.write_text(_SETTINGS.format(admin=_ADMIN, private=_PRIVATE, owner=owner["project_id"]))
    with running_mock() as mock, running_service(folder, mock.url, config=config) as service:
        service.keys("revoke", revoked["key_id"])
        yield _Tenants(service, owner, sibling, stranger, revoked)


def _new_account(data_dir: Path, organization: str, project: str) -> Account:
    """Create a key, possibly before the service starts, since its settings name a project."""
    arguments = ["keys", "create", "--json", "--org", organization, "--project", project]
    result = CliRunner().invoke(main, [*arguments, "--data-dir", str(data_dir)])
    assert result.exit_code == 0, result.output
    made: Account = json.loads(result.stdout)
    return made


@pytest.fixture(scope="module")
def objects(tenants: _Tenants) -> _Objects:
    """Return objects in every state; they change no more, except for lines that are never answered."""
    owner, client = tenants.owner, tenants.service.client(tenants.owner)
    completed = await_end(client, submit(client, chat_lines(["good", "[[status=400]]"])).id)
    files = {kind: str(getattr(completed, f"{kind}_file_id")) for kind in ("input", "output", "error")}
    files |= {kind: tenants.upload(owner) for kind in ("used", "lost", "deleted", "expired")}
    files["broken"] = client.files.create(file=b"{", purpose="batch").id
    batches = {
        "completed": completed.id,
        "failed": tenants.create(owner, files["broken"]).headers["x-batch-id"],
        "used": tenants.create(owner, files["used"], _IDEMPOTENCY).json["id"],
        "lost": tenants.create_and_leave(owner, files["lost"]),
    }
    for batch_id in batches.values():
        await_end(client, batch_id)
    batches |= {kind: submit(client, chat_lines(["[[hang]]"])).id for kind in ("running", "cancelling")}
    client.batches.cancel(batches["cancelling"])
    client.files.delete(files["deleted"])
    tenants.in_database("UPDATE files SET expires_at = 1 WHERE id = ?", files["expired"])
    return _Objects(files, batches)


def _routes() -> list[str]:
    """Return method and path of every route; HEAD comes with GET."""
    parts: dict[str, Any] = {part.name: Mock() for part in fields(ApiServices)}
    app: Any = build(ApiServices(**parts | {"settings": Settings()}))
    return [f"{method} {route.path}" for route in app._app.routes for method in route.app.methods]


def test_the_walk_knows_every_route() -> None:
    """A8: a new route must be added to the table, with the objects that it can name."""
    assert set(_routes()) == set(_WALK) | _OPEN


@pytest.mark.rule("A8", "On every route: a file of another project cannot be deleted.")
@pytest.mark.rule("A8", "On every route: a file of another project is no cursor.")
@pytest.mark.rule("A8", "On every route: a model of another project does not exist.")
@pytest.mark.rule("A8", "A lost answer is given again only to the key it was for.")
@pytest.mark.parametrize("asker", ["sibling", "stranger"])
@pytest.mark.parametrize("route", [route for route, probes in _WALK.items() if probes])
def test_what_another_has_does_not_exist(tenants: _Tenants, objects: _Objects, route: str, asker: str) -> None:
    """A8, A11, B5, B6, B10, C9, D6, E3: status, headers and body are those for an id that names nothing, and
    the object still exists.
    """
    before = _belongings(tenants, objects)
    account = getattr(tenants, asker)
    method = route.partition(" ")[0]
    for probe in _WALK[route]:
        for foreign in objects.named(probe.names):
            absent = _absent(foreign)
            for each in ("GET", "HEAD") if method == "GET" else (method,):
                to_foreign, to_absent = (tenants.ask(account, each, probe, named) for named in (foreign, absent))
                assert to_absent.status == probe.status
                assert _visible(to_foreign, foreign) == _visible(to_absent, absent)
    assert _belongings(tenants, objects) == before


@pytest.mark.parametrize("route", [route for route, probes in _WALK.items() if probes])
@pytest.mark.usefixtures("objects")  # it uses the idempotency key first
def test_the_same_requests_find_what_is_ones_own(tenants: _Tenants, route: str) -> None:
    """A8: without this, the test above would prove nothing."""
    owner = tenants.owner
    for probe in _WALK[route]:
        own = _PRIVATE if probe.names == _MODEL else tenants.upload(owner)
        if probe.names == _BATCH:
            own = tenants.create(owner, own).json["id"]
        reply = tenants.ask(owner, route.partition(" ")[0], probe, own)
        # 409 and 416 are answered only for objects that exist.
        assert reply.status in {200, 206, 409, 416}, reply.body


def _belongings(tenants: _Tenants, objects: _Objects) -> list[bytes]:
    """Return every object as the owner sees it."""
    paths = [f"/v1/files/{file_id}{part}" for file_id in objects.files.values() for part in ("", "/content")]
    paths += [f"/v1/batches/{batch_id}" for batch_id in objects.batches.values()]
    return [tenants.get(tenants.owner, path).body for path in paths]


def _absent(known: str) -> str:
    """Return an id of the same length that names nothing."""
    if known == _PRIVATE:
        return _ABSENT
    prefix = known[: known.index("_") + 1] if "_" in known else "file-"
    return prefix + uuid4().hex.upper()[: len(known) - len(prefix)]


def _visible(reply: Reply, named: str) -> tuple[int, list[tuple[str, str]], bytes]:
    """Return everything that a client sees of an answer, with the id replaced."""
    headers = [(name, value.replace(named, "ID")) for name, value in reply.headers.items()]
    compared = [header for header in headers if header[0] not in {"x-request-id", "date"}]
    return reply.status, compared, reply.body.replace(named.encode(), b"ID")


@pytest.mark.rule("A8", "A list of files shows only one's own.")
@pytest.mark.parametrize("asker", ["sibling", "stranger"])
@pytest.mark.parametrize(
    "path",
    [
        *("/v1/files", "/v1/files?order=asc", "/v1/files?purpose=batch", "/v1/files?purpose=batch_output"),
        *("/v1/batches", "/v1/batches?status=completed", "/v1/batches?status=in_progress", "/v1/models"),
    ],
)
def test_no_list_shows_what_another_has(tenants: _Tenants, objects: _Objects, path: str, asker: str) -> None:
    """A8, B5, C9, E3"""
    of_owner, of_other = (tenants.get(account, path) for account in (tenants.owner, getattr(tenants, asker)))
    listed = {entry["id"] for entry in of_owner.json["data"]}
    known = {*objects.files.values(), *objects.batches.values(), _PRIVATE}
    assert listed & known
    assert not {entry["id"] for entry in of_other.json["data"]} & known


@pytest.mark.parametrize("route", sorted(_OPEN))
def test_open_routes_contain_nothing_of_tenants(tenants: _Tenants, objects: _Objects, route: str) -> None:
    """A8, F5: neither ids nor models nor accounts, except that the metrics name the models of the operator's file."""
    path = route.partition(" ")[2].replace("{asset}", "docs.js")
    text = call(tenants.service.port, "GET", path, headers={}).body.decode()
    names = [*objects.files.values(), *objects.batches.values(), *tenants.owner.values()]
    if path != "/metrics":
        names.append(_PRIVATE)
    assert text
    assert [name for name in names if name in text] == []


@pytest.mark.rule("A8", "An Idempotency-Key is its project's own.")
@pytest.mark.parametrize("organization", ["first", "second"])
def test_an_idempotency_key_is_of_its_project(tenants: _Tenants, objects: _Objects, organization: str) -> None:
    """A8, A11: a key used in one project is new in another."""
    account = _new_account(tenants.service.data_dir, organization, "third")
    own = tenants.upload(account)
    fresh = {"idempotency-key": uuid4().hex}
    used, unused = (tenants.create(account, own, headers) for headers in (_IDEMPOTENCY, fresh))
    assert (used.status, used.headers.keys()) == (unused.status, unused.headers.keys()) == (200, unused.headers.keys())
    assert used.json["id"] not in objects.batches.values()
    replayed = tenants.create(tenants.owner, objects.files["used"], _IDEMPOTENCY)
    assert (replayed.json["id"], replayed.headers["x-batchline-replayed"]) == (objects.batches["used"], "true")


def test_an_answer_that_was_lost_is_given_again_only_to_the_key_it_was_for(tenants: _Tenants) -> None:
    """A8, A11: the test above asks as other tenants; this is the retry of the same key."""
    file_id = tenants.upload(tenants.owner)
    lost = tenants.create_and_leave(tenants.owner, file_id)
    assert tenants.create(tenants.stranger, file_id, _RETRY).status == 404
    again = tenants.create(tenants.owner, file_id, _RETRY)
    assert (again.json["id"], again.headers["x-batchline-replayed"]) == (lost, "true")


def test_a_line_for_another_projects_model_fails_as_one_for_none(tenants: _Tenants) -> None:
    """A8, D6"""
    client = tenants.service.client(tenants.stranger)
    lines = b"".join(chat_line(model, "one").replace(b'"m"', b'"%b"' % model.encode()) for model in (_PRIVATE, _ABSENT))
    batch = await_end(client, submit(client, lines).id)
    records = results_of(client, batch, lines)
    private, absent = (records[model] for model in (_PRIVATE, _ABSENT))
    assert private["error"]["code"] == "not_found_error"
    assert private["error"] == json.loads(json.dumps(absent["error"]).replace(_ABSENT, _PRIVATE))


def test_a_route_that_only_another_projects_model_serves_is_served_by_none(tenants: _Tenants) -> None:
    """A8, D6: no model serves /gliner, and only the owner's model serves /summary."""
    unnamed = [_Probe(_MODEL, path, body={"text": "one"}) for path in ("/summary", "/gliner")]
    private, absent = (tenants.ask(tenants.stranger, "POST", probe, "") for probe in unnamed)
    assert private.status == absent.status == 404
    assert private.body.replace(b"/summary", b"/gliner") == absent.body
    assert tenants.ask(tenants.owner, "POST", unnamed[0], "").status == 200


@pytest.mark.parametrize("route", _WALK)
def test_credentials_that_do_not_belong_together_are_unknown_ones(tenants: _Tenants, route: str) -> None:
    """A2, A1, A13: on every route, byte for byte; and the administrator's token is no key."""
    method, _, path = route.partition(" ")
    path = path.replace("{file_id}", "x").replace("{batch_id}", "x").replace("{model:path}", "x")
    project = tenants.owner["project_id"]

    def ask(headers: dict[str, str]) -> tuple[int, list[tuple[str, str]], bytes]:
        return _visible(call(tenants.service.port, method, path, headers=headers), "")

    unknown, missing = ask(_pair("bl-" + uuid4().hex, project)), ask({})
    assert (unknown[0], missing[0]) == (403, 401)
    for headers in (
        *(_pair(known["api_key"], project) for known in (tenants.sibling, tenants.stranger, tenants.revoked)),
        *(_pair(tenants.owner["api_key"], other) for other in (tenants.stranger["project_id"], str(uuid4()))),
        _pair(_ADMIN, project),
    ):
        assert ask(headers) == unknown
    for headers in (
        *(_bearer(_ADMIN), _bearer(_ADMIN) | {"x-project-id": project}, _bearer(tenants.revoked["api_key"])),
        *(_bearer(known["api_key"]) | {"x-project-id": project} for known in (tenants.stranger, tenants.owner)),
    ):
        assert ask(headers) == missing


def test_only_the_administrator_sees_metrics_from_elsewhere(tenants: _Tenants) -> None:
    """F5: the key of a project gives no access to the metrics."""
    key = tenants.owner["api_key"]
    own = credentials_of(tenants.owner)
    tried = (own, _bearer(key), own | _bearer(key), _pair(_ADMIN, own["x-project-id"]), _bearer(_ADMIN))
    relayed = [headers | {"x-forwarded-for": "203.0.113.9"} for headers in tried]
    statuses = [call(tenants.service.port, "GET", "/metrics", headers=headers).status for headers in relayed]
    assert statuses == [401, 403, 403, 401, 200]


@pytest.mark.rule("A8", "Usage is counted for the project that used.")
def test_usage_is_counted_for_the_project_that_used(tenants: _Tenants) -> None:
    """A8, D4: projects of one organization are counted separately, and so are projects of the same name."""
    service = tenants.service
    organizations = {"first": 3, "second": 2}
    accounts = {name: _new_account(service.data_dir, name, "counted") for name in organizations}
    for organization, calls in organizations.items():
        client = service.client(accounts[organization])
        await_end(client, submit(client, chat_lines(f"line {n}" for n in range(calls))).id)
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "one"}])
    for organization, calls in organizations.items():
        rows = json.loads(service.command("usage", "--json", "--project", accounts[organization]["project_id"]))
        assert [(row["organization"], row["project"], row["requests"]) for row in rows] == [
            (organization, "counted", calls + 1)
        ]


def _pair(key: str, project_id: str) -> dict[str, str]:
    return {"x-api-key": key, "x-project-id": project_id}


def _bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}
