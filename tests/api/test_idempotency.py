"""Creates that are asked for twice: A10, A11."""

import json
from collections.abc import Callable
from uuid import uuid4

import pytest
from starlette.requests import Request

from batchline.api.batches import is_retry
from tests.support.api_server import CHAT, LINE, Api, Held, wait_until

RETRY = {"x-stainless-retry-count": "1"}
NO_RETRIES = ["0", "00", "", "x", "-1", "1.5", "\xb2"]


@pytest.fixture
def file_id(api: Api) -> str:
    return str(api.upload().json["id"])


@pytest.mark.rule("A11", "The same Idempotency-Key gets the first answer again, byte for byte.")
def test_the_same_key_gets_the_same_answer_byte_for_byte(api: Api, file_id: str) -> None:
    """A11"""
    key = {"idempotency-key": str(uuid4())}
    first, second = (api.create(key, input_file_id=file_id, endpoint=CHAT) for _ in range(2))
    assert first.status == second.status == 200
    assert first.body == second.body
    assert "x-batchline-replayed" not in first.headers
    assert second.headers["x-batchline-replayed"] == "true"


@pytest.mark.rule("A11", "A 400 is repeated too.")
def test_a_refusal_is_repeated_too(api: Api) -> None:
    """A11, C3"""
    bad = api.upload(b"not json").json["id"]
    key = {"idempotency-key": str(uuid4())}
    first, second = (api.create(key, input_file_id=bad, endpoint=CHAT) for _ in range(2))
    assert first.status == second.status == 400
    assert first.body == second.body
    assert first.headers["x-batch-id"] == second.headers["x-batch-id"]
    assert second.headers["x-batchline-replayed"] == "true"


@pytest.mark.rule("A10", "A conflict tells the SDKs not to retry.")
@pytest.mark.rule("A11", "The same key with another body is 409.")
def test_the_same_key_with_another_body_is_409(api: Api, file_id: str) -> None:
    """A10, A11"""
    key = {"idempotency-key": str(uuid4())}
    api.create(key, input_file_id=file_id, endpoint=CHAT)
    reply = api.create(key, input_file_id=file_id, endpoint=CHAT, metadata={"another": 1})
    assert reply.status == 409
    assert reply.headers["x-should-retry"] == "false"
    assert reply.error["type"] == "invalid_request_error"


@pytest.mark.rule("A11", "A key belongs to its project.")
def test_a_key_is_of_its_project(api: Api, file_id: str) -> None:
    """A8, A11"""
    key = {"idempotency-key": str(uuid4())}
    mine = api.create(key, input_file_id=file_id, endpoint=CHAT).json["id"]
    stranger = api.new_account("second")
    theirs = api.upload(account=stranger).json["id"]
    body = json.dumps({"input_file_id": theirs, "endpoint": CHAT}).encode()
    reply = api.call("POST", "/v1/batches", body=body, headers=key, account=stranger)
    assert reply.status == 200
    assert reply.json["id"] != mine


def test_a_blank_key_is_none(api: Api, file_id: str) -> None:
    """A11"""
    first, second = (api.create({"idempotency-key": " "}, input_file_id=file_id, endpoint=CHAT) for _ in range(2))
    assert first.json["id"] != second.json["id"]


def test_a_key_without_measure_is_refused(api: Api, file_id: str) -> None:
    """A11"""
    reply = api.create({"idempotency-key": "k" * 256}, input_file_id=file_id, endpoint=CHAT)
    assert reply.status == 400
    assert reply.error["param"] == "Idempotency-Key"


@pytest.mark.rule("A11", "A retry of what was answered is a new create.")
def test_a_retry_of_what_was_answered_is_a_new_create(serve: Callable[..., Api]) -> None:
    """A11: the answer was fully sent, so its client knows that batch."""
    api = serve()
    file_id = api.upload().json["id"]
    first = api.create(input_file_id=file_id, endpoint=CHAT).json["id"]
    # The answer is marked right after it is sent; the server is through with it when it takes no more connection.
    wait_until(lambda: api.connections() == 0)
    wait_until(lambda: is_answered(api, first))
    retry = api.create(RETRY, input_file_id=file_id, endpoint=CHAT)
    assert retry.json["id"] != first
    assert "x-batchline-replayed" not in retry.headers


@pytest.mark.rule("A11", "A retry gets the answer that was never fully sent.")
def test_a_retry_gets_the_answer_that_its_client_did_not_wait_for(serve: Callable[..., Api]) -> None:
    """A11: the client leaves while its input is validated; the create goes on, and its answer is kept for it."""
    held: list[Held] = []

    def hold(validator: object) -> Held:
        held.append(Held(validator))
        return held[0]

    api = serve(wrap_validator=hold)
    file_id = api.upload(LINE).json["id"]
    body = json.dumps({"input_file_id": file_id, "endpoint": CHAT}).encode()
    with api.connect() as sock:
        sock.sendall(api.head("POST /v1/batches", f"content-length: {len(body)}") + body)
        assert held[0].entered.wait(60)
    wait_until(lambda: api.connections() == 0)
    api.await_(held[0].drop())
    wait_until(lambda: api.requests_in_flight() == 0)
    (lost,) = api.call("GET", "/v1/batches").json["data"]
    assert lost["status"] == "in_progress"
    retry = api.create(RETRY, input_file_id=file_id, endpoint=CHAT)
    assert retry.json["id"] == lost["id"]
    assert retry.headers["x-batchline-replayed"] == "true"
    wait_until(lambda: is_answered(api, lost["id"]))
    assert api.create(RETRY, input_file_id=file_id, endpoint=CHAT).json["id"] != lost["id"]


@pytest.mark.parametrize(("count", "retried"), [("1", True), ("12", True), *((text, False) for text in NO_RETRIES)])
def test_what_counts_as_a_retry(count: str, retried: bool) -> None:
    """A11"""
    scope = {"type": "http", "headers": [(b"x-stainless-retry-count", count.encode("latin-1"))]}
    assert is_retry(Request(scope)) is retried


def is_answered(api: Api, batch_id: str) -> bool:
    return api.ask("SELECT answered FROM batches WHERE id = ?", batch_id) == 1
