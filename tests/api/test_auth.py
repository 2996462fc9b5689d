"""Who may ask: A1, A2, A8, A13."""

from collections.abc import Callable
from uuid import uuid4

import pytest

from batchline.domain.ids import key_digest
from tests.support.api_server import FORM, Account, Api, Counting

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
