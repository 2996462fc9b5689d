"""Batches at the door: C1, C2, C3, C6, C8 to C10, A12."""

import json
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from batchline.api.batches import create_request
from batchline.domain.errors import InvalidRequest
from tests.support.api_server import CHAT, LINE, Account, Api, Held, read_reply

FIELDS = {
    "id", "object", "endpoint", "errors", "input_file_id", "completion_window", "status", "output_file_id",
    "error_file_id", "created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at",
    "expired_at", "cancelling_at", "cancelled_at", "request_counts", "metadata",
}  # fmt: skip


@pytest.fixture(scope="module")
def file_id(api: Api) -> str:
    return str(api.upload().json["id"])


@pytest.fixture(scope="module")
def bad_file_id(api: Api) -> str:
    return str(api.upload(LINE + b"not json\n").json["id"])


def new_batch(api: Api, account: Account | None = None) -> str:
    file = api.upload(account=account).json["id"]
    body = json.dumps({"input_file_id": file, "endpoint": CHAT}).encode()
    return str(api.call("POST", "/v1/batches", body=body, account=account).json["id"])


def test_a_create_is_answered_with_the_batch(api: Api, file_id: str) -> None:
    """C1, C7"""
    reply = api.create(input_file_id=file_id, endpoint=CHAT, completion_window="24h", metadata={"job": "nightly"})
    assert reply.status == 200
    batch = reply.json
    assert FIELDS <= set(batch) <= FIELDS | {"usage", "model"}
    assert batch["status"] == "in_progress"
    assert batch["request_counts"] == {"total": 1, "completed": 0, "failed": 0}
    assert batch["metadata"] == {"job": "nightly"}
    assert "x-batch-id" not in reply.headers
    assert "x-batchline-replayed" not in reply.headers
    assert api.call("GET", f"/v1/batches/{batch['id']}").json == batch


@pytest.mark.rule("C1", "What is null counts as not given.")
@pytest.mark.parametrize("extra", [{}, {"completion_window": None, "metadata": None}, {"something_new": {}}])
def test_what_is_null_counts_as_not_given_and_what_is_unknown_is_ignored(
    api: Api, file_id: str, extra: dict[str, Any]
) -> None:
    """C1"""
    batch = api.create(input_file_id=file_id, endpoint=CHAT, **extra).json
    assert batch["metadata"] == {}
    assert batch["completion_window"] == "24h"


GOOD = {"input_file_id": "file-x", "endpoint": CHAT}


@pytest.mark.rule("C1", "completion_window is 24h or not given.")
@pytest.mark.parametrize(
    ("change", "message", "param"),
    [
        ({"input_file_id": None}, "input_file_id is required", "input_file_id"),
        ({"input_file_id": 7}, "input_file_id is required", "input_file_id"),
        ({"input_file_id": ""}, "input_file_id is required", "input_file_id"),
        ({"input_file_id": None, "endpoint": None}, "input_file_id is required", "input_file_id"),
        ({"endpoint": None}, "endpoint is required", "endpoint"),
        ({"endpoint": ["x"]}, "endpoint is required", "endpoint"),
        ({"endpoint": "x" * 1025}, "endpoint exceeds maximum size of 1024 characters", "endpoint"),
        ({"endpoint": 1, "completion_window": "1h"}, "endpoint is required", "endpoint"),
        ({"completion_window": "1h"}, 'completion_window must be "24h"', "completion_window"),
        ({"completion_window": ""}, 'completion_window must be "24h"', "completion_window"),
        ({"completion_window": 24}, 'completion_window must be "24h"', "completion_window"),
        ({"completion_window": "1h", "metadata": 1}, 'completion_window must be "24h"', "completion_window"),
        ({"metadata": []}, "metadata must be a JSON object", "metadata"),
        ({"metadata": "text"}, "metadata must be a JSON object", "metadata"),
        ({"metadata": False}, "metadata must be a JSON object", "metadata"),
        ({"metadata": {"k": "v" * 65_536}}, "metadata exceeds maximum size of 65536 bytes", "metadata"),
    ],
)
def test_faults_of_the_body_are_told_in_order_and_persist_nothing(
    api: Api, change: dict[str, Any], message: str, param: str
) -> None:
    """C1, C2, C3, A12"""
    before = api.call("GET", "/v1/batches").json["first_id"]
    reply = api.create(**(GOOD | change))
    assert reply.status == 400
    assert reply.error == {
        "message": message,
        "type": "invalid_request_error",
        "code": "invalid_request_error",
        "param": param,
    }
    assert "x-batch-id" not in reply.headers
    assert api.call("GET", "/v1/batches").json["first_id"] == before


def test_missing_fields_are_required_too(api: Api) -> None:
    """C2"""
    assert api.create().error["message"] == "input_file_id is required"
    assert api.create(input_file_id="file-x").error["message"] == "endpoint is required"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"null",
        b'"text"',
        b"{",
        b'{"input_file_id": NaN}',
        b'{"a": 1,}',
        b'{"metadata": {"k": "\xff"}}',
        b'{"metadata": {"k": "\\ud800"}}',
        b"{} {}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_a_body_that_is_no_json_object_is_400(api: Api, body: bytes) -> None:
    """C1"""
    reply = api.call("POST", "/v1/batches", body=body)
    assert reply.status == 400
    assert reply.error["code"] == "invalid_request_error"
    assert reply.error["param"] is None


def test_a_body_without_measure_is_413(api: Api) -> None:
    """A6"""
    reply = api.call("POST", "/v1/batches", body=b" " * 1_500_000 + b"{}")
    assert reply.status == 413
    assert reply.error["code"] == "request_too_large"


METADATA = [
    b"{}",
    b'{ "spaced" : 1 }',
    b'{"big":123456789012345678901234567890,"price":1.10,"exp":1E+2}',
    b'{"z":1,"a":2,"z":3}',
    '{"naïve":"名前 \u2028"}'.encode(),
    b'{"escaped":"\\u00e9\\/","nul":"\\u0000"}',
    b'{"deep":' + b"[" * 200 + b"]" * 200 + b"}",
    b'{"k":"' + b"v" * (65_536 - 8) + b'"}',
]


@pytest.mark.rule("C1", "Metadata is echoed unchanged, byte for byte.")
@pytest.mark.parametrize("metadata", METADATA)
def test_metadata_is_echoed_byte_for_byte(api: Api, file_id: str, metadata: bytes) -> None:
    """C1: echoed unchanged, on every route that shows it."""
    body = b'{"input_file_id":"%s","endpoint":"%s","metadata":%s}' % (file_id.encode(), CHAT.encode(), metadata)
    created = api.call("POST", "/v1/batches", body=body)
    assert created.status == 200
    batch_id = created.json["id"]
    for reply in (created, api.call("GET", f"/v1/batches/{batch_id}"), api.call("GET", "/v1/batches?limit=1")):
        assert b'"metadata":' + metadata in reply.body


def test_the_last_of_a_repeated_field_counts() -> None:
    """C1: as everywhere in JSON here."""
    request = create_request(b'{"input_file_id":"a","endpoint":"e","endpoint":"\\u0065e","metadata":1,"metadata":{}}')
    assert (request.input_file_id, request.endpoint, request.metadata) == ("a", "ee", b"{}")
    with pytest.raises(InvalidRequest):
        create_request(b'{"input_file_id":"a","endpoint":"e","endpoint":null}')


@pytest.mark.rule("C2", "An input that is not there is 404, as it was named.")
def test_an_unknown_input_is_404_as_it_was_named(api: Api) -> None:
    """C2, B10"""
    for file_id in ("file-nothing", "file_nothing", "anything"):
        reply = api.create(input_file_id=file_id, endpoint=CHAT)
        assert reply.status == 404
        assert reply.error["message"] == f"Input file not found: {file_id}"


@pytest.mark.rule("C3", "A refused file is 400 with its first offending line, and its batch is kept as failed.")
def test_an_invalid_input_is_400_and_its_batch_can_be_looked_up(api: Api, bad_file_id: str) -> None:
    """C3"""
    reply = api.create(input_file_id=bad_file_id, endpoint=CHAT)
    assert reply.status == 400
    assert reply.error == {
        "message": "Line 2 is not valid JSON",
        "type": "invalid_request_error",
        "code": "invalid_request_error",
        "param": None,
        "line": 2,
    }
    batch = api.call("GET", f"/v1/batches/{reply.headers['x-batch-id']}").json
    assert batch["status"] == "failed"
    assert batch["errors"]["data"][0]["line"] == 2
    assert set(batch) >= FIELDS


def test_a_batch_is_listed_while_it_is_validated_and_can_be_cancelled(serve: Callable[..., Api]) -> None:
    """C6, C10"""
    held: list[Held] = []

    def hold(validator: object) -> Held:
        held.append(Held(validator))
        return held[0]

    api = serve(wrap_validator=hold)
    body = json.dumps({"input_file_id": api.upload().json["id"], "endpoint": CHAT}).encode()
    with api.connect() as sock:
        sock.sendall(api.head("POST /v1/batches", f"content-length: {len(body)}") + body)
        assert held[0].entered.wait(60)
        (batch,) = api.call("GET", "/v1/batches").json["data"]
        assert batch["status"] == "validating"
        assert api.call("POST", f"/v1/batches/{batch['id']}/cancel").json["status"] == "cancelled"
        api.await_(held[0].drop())
        reply = read_reply(sock)
    assert reply.status == 200
    assert reply.json["status"] == "cancelled"
    assert reply.json["request_counts"] == {"total": 0, "completed": 0, "failed": 0}


@pytest.mark.rule("C8", "A batch that is not there is 404, an empty id 400.")
def test_an_unknown_batch_is_404(api: Api) -> None:
    """C8, A12"""
    for method, path in (("GET", "/v1/batches/batch_x"), ("POST", "/v1/batches/batch_x/cancel")):
        reply = api.call(method, path)
        assert reply.status == 404
        assert reply.error == {
            "message": "Batch not found: batch_x",
            "type": "invalid_request_error",
            "code": "batch_not_found",
            "param": None,
        }


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/batches/"), ("POST", "/v1/batches//cancel")])
def test_an_empty_batch_id_is_400(api: Api, method: str, path: str) -> None:
    """C8, A12"""
    reply = api.call(method, path)
    assert reply.status == 400
    assert reply.error["param"] == "batch_id"


def test_cancelling_is_idempotent(api: Api) -> None:
    """C10: with an empty body that calls itself JSON, as openai-python sends it."""
    batch_id = new_batch(api)
    headers = {"content-type": "application/json"}
    first = api.call("POST", f"/v1/batches/{batch_id}/cancel", headers=headers)
    assert first.status == 200
    assert first.json["status"] == "cancelling"
    assert isinstance(first.json["cancelling_at"], int)
    assert api.call("POST", f"/v1/batches/{batch_id}/cancel", headers=headers).body == first.body


@pytest.mark.rule("A12", "Cancelling what is over is batch_not_cancellable.")
@pytest.mark.rule("C10", "Completed, failed and expired batches are 409.")
def test_a_batch_that_is_over_cannot_be_cancelled(api: Api, bad_file_id: str) -> None:
    """C10, A10, A12"""
    batch_id = api.create(input_file_id=bad_file_id, endpoint=CHAT).headers["x-batch-id"]
    reply = api.call("POST", f"/v1/batches/{batch_id}/cancel")
    assert reply.status == 409
    assert reply.error["code"] == "batch_not_cancellable"
    assert reply.headers["x-should-retry"] == "false"


def test_an_empty_list_of_batches(api: Api) -> None:
    """C9"""
    account = api.new_account(f"empty-{uuid4()}")
    reply = api.call("GET", "/v1/batches", account=account)
    assert reply.json == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


@pytest.fixture(scope="module")
def many(api: Api) -> tuple[Account, list[str]]:
    """A project with 22 batches, the newest first."""
    account = api.new_account(f"many-{uuid4()}")
    return account, [new_batch(api, account) for _ in range(22)][::-1]


@pytest.mark.rule("C9", "Newest first, 20 a page, clamped to 1 to 100.")
@pytest.mark.parametrize(
    ("query", "shown"), [("", 20), ("?limit=5", 5), ("?limit=0", 1), ("?limit=-3", 1), ("?limit=1000", 22)]
)
def test_limits_are_clamped(api: Api, many: tuple[Account, list[str]], query: str, shown: int) -> None:
    """C9"""
    account, batches = many
    page = api.call("GET", f"/v1/batches{query}", account=account).json
    assert [batch["id"] for batch in page["data"]] == batches[:shown]
    assert page["has_more"] == (shown < 22)


@pytest.mark.parametrize("limit", ["ten", "", "1.5", "1e1"])
def test_a_limit_that_is_no_integer_is_400(api: Api, limit: str) -> None:
    """C9"""
    reply = api.call("GET", f"/v1/batches?limit={limit}")
    assert reply.status == 400
    assert (reply.error["code"], reply.error["param"]) == ("invalid_limit", "limit")


@pytest.mark.rule("C9b", "Pages stay exact while rows are added.")
def test_pages_are_exact_while_batches_are_added(api: Api) -> None:
    """C9b: paging with the id of the last item."""
    account = api.new_account(f"growing-{uuid4()}")
    old = [new_batch(api, account) for _ in range(5)][::-1]
    seen: list[str] = []
    while True:
        after = f"&after={seen[-1]}" if seen else ""
        page = api.call("GET", f"/v1/batches?limit=2{after}", account=account).json
        seen += [batch["id"] for batch in page["data"]]
        new_batch(api, account)
        if not page["has_more"]:
            break
    assert seen == old


@pytest.mark.parametrize("after", ["batch_nothing", ""])
def test_an_unknown_cursor_is_400(api: Api, after: str) -> None:
    """C9"""
    reply = api.call("GET", f"/v1/batches?after={after}")
    assert reply.status == 400
    assert reply.error["param"] == "after"


def test_lists_can_be_filtered(api: Api) -> None:
    """C9"""
    account = api.new_account(f"filtered-{uuid4()}")
    running, cancelled = new_batch(api, account), new_batch(api, account)
    api.call("POST", f"/v1/batches/{cancelled}/cancel", account=account)
    at = api.call("GET", f"/v1/batches/{running}", account=account).json["created_at"]
    found = {
        query: [b["id"] for b in api.call("GET", f"/v1/batches?{query}", account=account).json["data"]]
        for query in ("status=in_progress", "status=cancelling", "status=failed")
    }
    assert found == {"status=in_progress": [running], "status=cancelling": [cancelled], "status=failed": []}
    for query, count in (
        (f"created_after={at - 5}", 2),
        (f"created_after={at + 60}", 0),
        (f"created_before={at - 5}", 0),
        (f"created_before={at + 60}", 2),
        (f"created_before={'9' * 40}", 2),
    ):
        assert len(api.call("GET", f"/v1/batches?{query}", account=account).json["data"]) == count


@pytest.mark.parametrize("query", ["status=running", "created_after=yesterday", "created_before="])
def test_filters_that_mean_nothing_are_400(api: Api, query: str) -> None:
    """C9"""
    reply = api.call("GET", f"/v1/batches?{query}")
    assert reply.status == 400
    assert reply.error["param"] == query.split("=", maxsplit=1)[0]
