"""Who may ask: A1, A2, A8, A13."""

import json
from collections.abc import Callable
from uuid import uuid4

import pytest

from batchline.api import auth
from batchline.domain.ids import key_digest
from tests.support.api_server import (
    CHAT,
    FORM,
    LINE,
    Account,
    Api,
    Counting,
    Reply,
    field,
    file_part,
    form,
    read_reply,
    wait_until,
)

ROUTES = [
    ("GET", "/v1/files"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files/file-x"),
    ("DELETE", "/v1/files/file-x"),
    ("GET", "/v1/files/file-x/content"),
    ("GET", "/v1/batches"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches/batch_x"),
    ("POST", "/v1/batches/batch_x/cancel"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/summary"),
    ("POST", "/usecase/classify/iab"),
    ("POST", "/gliner"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/m"),
]
MISSING = {"message": "Missing authentication headers", "type": "authentication_error", "code": None, "param": None}
INVALID = {"message": "Invalid credentials", "type": "authentication_error", "code": None, "param": None}


@pytest.mark.rule("A1", "Without both headers, or with a blank one, a request is answered with 401.")
@pytest.mark.rule("E1", "The same auth as everywhere.")
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_wants_both_headers(api: Api, method: str, path: str) -> None:
    """A1"""
    both = api.account.headers
    for headers in ({}, {"x-api-key": both["x-api-key"]}, {"x-project-id": both["x-project-id"]}):
        reply = api.call(method, path, anonymous=True, headers=headers)
        assert reply.status == 401
        assert reply.error == MISSING


@pytest.mark.parametrize("blank", ["", " ", "\t "])
@pytest.mark.parametrize("name", ["x-api-key", "x-project-id"])
def test_a_blank_header_is_a_missing_one(api: Api, name: str, blank: str) -> None:
    """A1"""
    reply = api.call("GET", "/v1/files", headers={name: blank})
    assert reply.status == 401
    assert reply.error == MISSING


@pytest.mark.rule("A13", "BATCHLINE_BEARER=off turns bearer tokens off.")
def test_a_bearer_token_is_no_key_where_that_is_turned_off(shared: Callable[..., Api]) -> None:
    """A13, A1"""
    api = shared(bearer=False)
    bearer = {"authorization": f"Bearer {api.account.key}"}
    assert api.call("GET", "/v1/files", anonymous=True, headers=bearer).error == MISSING
    assert api.call("GET", "/v1/files", headers=bearer).status == 200


@pytest.mark.rule("A13", "A key alone authenticates, with its own project.")
@pytest.mark.parametrize("scheme", ["Bearer ", "bearer  "])
def test_a_key_alone_is_enough(api: Api, scheme: str) -> None:
    """A13: by default."""
    mine = api.upload().json["id"]
    bearer = {"authorization": f"{scheme}{api.account.key}"}
    assert api.call("GET", f"/v1/files/{mine}", anonymous=True, headers=bearer).status == 200
    stranger = {"authorization": f"Bearer {api.new_account('second').key}"}
    assert api.call("GET", f"/v1/files/{mine}", anonymous=True, headers=stranger).status == 404


@pytest.mark.rule("A13", "Any other bearer token alone is no credentials.")
@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer  ", "Basic {key}", "{key}", "Bearer bl-unknown", "Bearer {old}"]
)
def test_any_other_token_alone_is_no_credentials(api: Api, header: str) -> None:
    """A13, A1: also a key that was revoked."""
    revoked = api.new_account("first")
    assert api.await_(api.store.revoke_key(revoked.key_id, at=2))
    headers = {"authorization": header.format(key=api.account.key, old=revoked.key)}
    reply = api.call("GET", "/v1/files", anonymous=True, headers=headers)
    assert (reply.status, reply.error) == (401, MISSING)


@pytest.mark.rule("A1", "A bearer token beside the two headers is ignored.")
@pytest.mark.rule("A13", "Where one of the two headers is sent, the headers alone count.")
def test_where_one_of_the_two_headers_is_sent_the_headers_alone_count(api: Api) -> None:
    """A13, A1: the SDKs always send a token."""
    bearer, mine = {"authorization": f"Bearer {api.account.key}"}, api.account.headers
    assert api.call("GET", "/v1/files", headers={"authorization": "Bearer wrong"}).status == 200
    for name in mine:
        for value in (mine[name], ""):
            reply = api.call("GET", "/v1/files", anonymous=True, headers=bearer | {name: value})
            assert (reply.status, reply.error) == (401, MISSING)
    reply = api.call("GET", "/v1/files", headers=bearer | {"x-api-key": "bl-unknown"})
    assert (reply.status, reply.error) == (403, INVALID)


def test_a_project_is_a_uuid_in_either_case(api: Api) -> None:
    """A1"""
    assert api.call("GET", "/v1/files", headers={"x-project-id": api.account.project_id.upper()}).status == 200


@pytest.mark.rule("A2", "Whatever is wrong with credentials looks the same: 403, after one lookup.")
@pytest.mark.rule("A2", "A key opens its own project and no other.")
def test_everything_wrong_looks_the_same_and_costs_one_lookup(serve: Callable[..., Api]) -> None:
    """A2"""
    counting: list[Counting] = []

    def count(store: object) -> Counting:
        counting.append(Counting(store))
        return counting[0]

    api = serve(wrap_store=count)
    revoked, other = api.new_account("first"), api.new_account("second")
    assert api.await_(api.store.revoke_key(revoked.key_id, at=2))
    mine = api.account
    wrong = [
        Account("bl-unknown", "", mine.project_id),
        Account(mine.key, "", str(uuid4())),
        Account(mine.key, "", "no uuid"),
        Account(mine.key, "", other.project_id),
        Account("caf\xe9", "", mine.project_id),
        revoked,
    ]
    for account in wrong:
        counting[0].calls.clear()
        reply = api.call("GET", "/v1/files", account=account)
        assert (reply.status, reply.error) == (403, INVALID)
        assert counting[0].calls == ["owner_of"]


def test_a_header_sent_twice_is_no_credential(api: Api) -> None:
    """A2: whichever of the two another server would have read, here it is neither."""
    twice = [*api.account.headers.items(), ("x-api-key", "bl-other")]
    for headers in (twice, twice[::-1], [*api.account.headers.items(), ("x-api-key", api.account.key)]):
        with api.connect() as sock:
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
            sock.sendall(f"GET /v1/files HTTP/1.1\r\nhost: test\r\n{lines}\r\n".encode())
            assert sock.recv(65536).startswith(b"HTTP/1.1 403 ")


def test_a_rotated_key_works_and_its_old_secret_does_not(api: Api) -> None:
    """A2"""
    account = api.new_account("first")
    assert api.await_(api.store.rotate_key(account.key_id, digest=key_digest("bl-new"), hint="bl-new"))
    assert api.call("GET", "/v1/files", account=account).status == 403
    assert api.call("GET", "/v1/files", account=Account("bl-new", "", account.project_id)).status == 200


@pytest.mark.rule("F3", "A key may be used for its scopes alone.")
@pytest.mark.parametrize("scope", ["read", "batch", "inference"])
@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_a_key_may_be_used_for_its_scopes_alone(api: Api, scope: str, method: str, path: str) -> None:
    """F3: every route needs one; the list of models is open to all."""
    needed = (
        "inference" if not path.startswith(("/v1/files", "/v1/batches")) else "read" if method == "GET" else "batch"
    )
    reply = api.call(method, path, account=api.new_account("scoped", scopes=scope))
    if path.startswith("/v1/models") or scope == needed:
        assert reply.status != 403
    else:
        assert reply.status == 403
        assert reply.error == INVALID | {"message": f"The key may not be used for this: it lacks the scope {needed}"}


@pytest.mark.rule("F3", "A key that has expired is refused like an unknown one.")
def test_an_expired_key_is_an_unknown_one(api: Api) -> None:
    """A2, A13"""
    expired, later = api.new_account("first", expires_at=1), api.new_account("first", expires_at=10**11)
    assert api.call("GET", "/v1/files", account=later).status == 200
    assert api.call("GET", "/v1/files", account=expired).error == INVALID
    bearer = {"authorization": f"Bearer {expired.key}"}
    assert api.call("GET", "/v1/files", anonymous=True, headers=bearer).error == MISSING


@pytest.mark.rule("A8", "What belongs to another project is answered as if it did not exist.")
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/files/{file}"),
        ("DELETE", "/v1/files/{file}"),
        ("GET", "/v1/files/{file}/content"),
        ("GET", "/v1/batches/{batch}"),
        ("POST", "/v1/batches/{batch}/cancel"),
        ("GET", "/v1/files?after={file}"),
        ("GET", "/v1/batches?after={batch}"),
    ],
)
def test_what_belongs_to_another_project_does_not_exist(api: Api, method: str, path: str) -> None:
    """A8: byte for byte."""
    mine = api.upload().json["id"]
    batch = api.create(input_file_id=mine, endpoint="/v1/chat/completions").json["id"]
    stranger = api.new_account("second")
    unknown = {"file": f"file-{uuid4().hex}", "batch": f"batch_{'0' * 26}"}
    foreign = api.call(method, path.format(file=mine, batch=batch), account=stranger)
    absent = api.call(method, path.format(**unknown), account=stranger)
    assert foreign.status == absent.status >= 400
    body = foreign.body.replace(mine.encode(), unknown["file"].encode())
    assert body.replace(batch.encode(), unknown["batch"].encode()) == absent.body
    assert api.call("GET", f"/v1/files/{mine}").status == 200
    assert api.call("GET", f"/v1/batches/{batch}").json["status"] == "in_progress"


def test_another_projects_file_is_no_input(api: Api) -> None:
    """A8"""
    stranger = api.new_account("second")
    theirs = api.upload(account=stranger).json["id"]
    reply = api.create(input_file_id=theirs, endpoint="/v1/chat/completions")
    assert reply.status == 404
    assert reply.error["message"] == f"Input file not found: {theirs}"


def test_lists_show_only_ones_own(api: Api) -> None:
    """A8"""
    api.upload()
    loner = api.new_account(f"loner-{uuid4()}")
    assert api.call("GET", "/v1/files", account=loner).json["data"] == []
    assert api.call("GET", "/v1/batches", account=loner).json["data"] == []


def test_credentials_come_before_the_body(api: Api) -> None:
    """A1, B2: a stranger cannot make us store a byte."""
    before = api.stored()
    reply = api.call("POST", "/v1/files", body=b"x", headers=FORM, anonymous=True)
    assert reply.status == 401
    assert api.stored() == before


UPLOAD = form(field("purpose", "batch"), file_part(LINE * 100))
BODIES = {
    "/v1/files": UPLOAD,
    "/v1/batches": json.dumps({"input_file_id": "file-x", "endpoint": CHAT}).encode(),
    "/v1/batches/check": json.dumps({"input_file_id": "file-x", "endpoint": CHAT}).encode(),
    "/v1/batches/batch_x/rerun": b'{"codes": []}',
    CHAT: b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}',
}


def _hold_body_back(api: Api, path: str, credentials: dict[str, str], then: Callable[[], object]) -> Reply:
    """Send a request without the last byte of its body, and that byte after ``then`` was called."""
    body = BODIES[path]
    headers = {"host": "test", "content-length": str(len(body)), **FORM, **credentials}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with api.connect() as sock:
        sock.sendall(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body[:-1])
        wait_until(lambda: bool(api.used) and (path != "/v1/files" or api.uploading() == 1))
        then()
        sock.sendall(body[-1:])
        return read_reply(sock)


@pytest.mark.rule("F3", "A request whose body arrives after the end of its key is refused like a new one.")
@pytest.mark.parametrize("bearer", [False, True])
@pytest.mark.parametrize("end", ["revoked", "expired", "rotated", "narrowed"])
@pytest.mark.parametrize("path", BODIES)
def test_a_body_that_is_held_back_does_not_outlive_its_key(
    serve: Callable[..., Api], monkeypatch: pytest.MonkeyPatch, path: str, end: str, bearer: bool
) -> None:
    monkeypatch.setattr(auth, "_TRUSTED_SECONDS", 0)
    api = serve()
    account = api.new_account("first", expires_at=int(api.clock.now()) + 3600)
    [key] = [each for each in api.await_(api.store.keys()) if each.id == account.key_id]

    def end_key() -> None:
        if end == "revoked":
            assert api.await_(api.store.revoke_key(account.key_id, at=2))
        elif end == "rotated":
            assert api.await_(api.store.rotate_key(account.key_id, digest=key_digest("bl-new"), hint="bl-new"))
        elif end == "narrowed":
            change = api.store.change_key(key, name="", scopes="read", expires_at=key.expires_at)
            assert api.await_(change)
        else:
            api.clock.ahead = 3600

    credentials = {"authorization": f"Bearer {account.key}"} if bearer else account.headers
    refused = _hold_body_back(api, path, credentials, end_key)
    again = api.call("POST", path, body=BODIES[path], headers={**FORM, **credentials}, anonymous=True)
    assert (refused.status, refused.error) == (again.status, again.error)
    assert refused.error["type"] == "authentication_error"
    wait_until(lambda: api.uploading() == 0)
    assert (api.stored(), api.ask("SELECT count(*) FROM files WHERE state = 'stored'")) == ([], 0)
    assert api.ask("SELECT count(*) FROM batches") == 0
    assert api.usage() == []


@pytest.mark.parametrize("path", BODIES)
def test_a_key_is_looked_up_again_only_if_the_body_took_long(
    serve: Callable[..., Api], monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """F3: a request whose body comes at once costs one lookup, and a slow one with a valid key is answered."""
    counting: list[Counting] = []

    def count(store: object) -> Counting:
        counting.append(Counting(store))
        return counting[0]

    api = serve(wrap_store=count)
    for trusted_seconds, lookups in ((3600, 1), (0, 2)):
        monkeypatch.setattr(auth, "_TRUSTED_SECONDS", trusted_seconds)
        counting[0].calls.clear()
        reply = _hold_body_back(api, path, api.account.headers, lambda: None)
        assert reply.status == (404 if path.startswith("/v1/batches") else 200)
        assert counting[0].calls.count("owner_of") == lookups
