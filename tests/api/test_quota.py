"""Who has nothing left: A3; and whose key was used: F3."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.api_server import CHAT, LINE, Account, Api, Held, Reply, wait_until
from tests.support.manual_upstream import ManualUpstream

CALLS = [CHAT, "/v1/responses", "/summary", "/usecase/classify/iab", "/gliner"]


@pytest.fixture
def metered(shared: Callable[..., Api]) -> Api:
    return shared(metering=True)


@pytest.fixture
def account(metered: Api, request: pytest.FixtureRequest) -> Account:
    """One of its own organization, with free credits."""
    return metered.new_account(request.node.name)


def refused_for_quota(reply: Reply) -> bool:
    if reply.status != 429:
        return False
    assert (reply.error["type"], reply.error["code"]) == ("insufficient_quota", "insufficient_quota")
    assert reply.headers["x-should-retry"] == "false"
    assert reply.headers["retry-after"] is None
    return True


def call(api: Api, path: str, account: Account) -> Reply:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "input": "x", "text": "x"}
    return api.post(path, body, account=account)


def create(api: Api, account: Account, file_id: str, **headers: str) -> Reply:
    body = b'{"input_file_id":"%b","endpoint":"%b"}' % (file_id.encode(), CHAT.encode())
    return api.call("POST", "/v1/batches", body=body, account=account, headers=headers)


@pytest.mark.rule("A3", "Nothing left is exactly nothing.")
@pytest.mark.rule("A3", "It is 429, with type and code insufficient_quota.")
@pytest.mark.rule("A3", "Uploads ask for something left.")
@pytest.mark.rule("A3", "Creating a batch asks for something left.")
@pytest.mark.rule("A3", "Synchronous calls ask for something left.")
@pytest.mark.rule("A10", "insufficient_quota tells the SDKs not to retry.")
@pytest.mark.parametrize("funds", [0, -5])
def test_who_has_nothing_left_can_neither_store_nor_spend(metered: Api, account: Account, funds: int) -> None:
    """A3, A10"""
    file_id = metered.upload(account=account).json["id"]
    metered.set_funds(funds, account=account)
    assert refused_for_quota(metered.upload(account=account))
    assert refused_for_quota(create(metered, account, file_id))
    assert all(refused_for_quota(call(metered, path, account)) for path in CALLS)
    assert metered.usage(account) == []


def test_a_nano_unit_is_something(metered: Api, account: Account) -> None:
    """A3"""
    metered.set_funds(1, account=account)
    file_id = metered.upload(account=account).json["id"]
    assert create(metered, account, file_id).status == 200
    assert call(metered, CHAT, account).status == 200


PRICED = {"models": {"m": {"input_price": "1", "output_price": "10"}}, "metering": True}


def chat(max_tokens: int | None = None) -> dict[str, Any]:
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    return {"model": "m", "messages": [{"role": "user", "content": "x"}], **limit}


@pytest.mark.rule("D4", "What a call may cost is held against the balance.")
@pytest.mark.parametrize("max_tokens", [100_000, None])
def test_calls_at_once_cannot_spend_more_than_is_left(
    serve: Callable[..., Api], manual_upstream: ManualUpstream, max_tokens: int | None
) -> None:
    """D4, A3: with room for one call and a half, one of many at once runs; with too little for one, none does."""
    api = serve(upstream_url=manual_upstream.url, **PRICED)
    likely = (max_tokens or 1024) * 10_000
    api.set_funds(likely * 3 // 2)
    with ThreadPoolExecutor(20) as pool:
        first = pool.submit(api.post, CHAT, chat(max_tokens))
        peer = manual_upstream.accept()
        peer.read()
        if max_tokens is None:
            second = pool.submit(api.post, CHAT, chat())
            other = manual_upstream.accept()
            other.read()
        refused = list(pool.map(lambda _: api.post(CHAT, chat(max_tokens)), range(18)))
        assert {(reply.status, reply.error["code"], reply.headers["retry-after"]) for reply in refused} == {
            (429, "rate_limit_exceeded", "1")
        }
        peer.answer(json.dumps({"usage": {"prompt_tokens": 10, "completion_tokens": 100}}).encode())
        assert first.result().status == 200
        if max_tokens is None:
            other.answer(json.dumps({"usage": {"prompt_tokens": 10, "completion_tokens": 100}}).encode())
            assert second.result().status == 200
    calls = 1 if max_tokens else 2
    assert api.funds() == likely * 3 // 2 - calls * (10 * 1000 + 100 * 10_000)
    api.set_funds(1)
    assert refused_for_quota(api.post(CHAT, chat(max_tokens)))


def test_what_a_call_held_is_free_again_after_it(shared: Callable[..., Api]) -> None:
    """D4: settled by the usage; a refused call holds nothing any more."""
    api = shared(**PRICED)
    account = api.new_account("settled")
    api.set_funds(15_000_000, account=account)
    for body in (chat(1000), chat(1000) | {"messages": [{"role": "user", "content": "[[status=500]]"}]}) * 3:
        assert not refused_for_quota(api.post(CHAT, body, account=account))


@pytest.mark.rule("A3", "Downloads stay open to who has nothing left.")
@pytest.mark.rule("A3", "Cancelling stays open.")
def test_what_is_there_stays_open(metered: Api, account: Account) -> None:
    """A3: reads, downloads, cancel and delete."""
    file_id = metered.upload(account=account).json["id"]
    batch_id = create(metered, account, file_id).json["id"]
    metered.set_funds(0, account=account)
    for method, path in [
        ("GET", "/v1/files"),
        ("GET", f"/v1/files/{file_id}"),
        ("GET", f"/v1/files/{file_id}/content"),
        ("GET", "/v1/batches"),
        ("GET", f"/v1/batches/{batch_id}"),
        ("POST", f"/v1/batches/{batch_id}/cancel"),
        ("DELETE", f"/v1/files/{file_id}"),
        ("GET", "/v1/models"),
    ]:
        assert metered.call(method, path, account=account).status == 200


@pytest.mark.rule("A3", "An answer that was given before is given again though nothing is left.")
def test_an_answer_is_given_again_though_nothing_is_left(metered: Api, account: Account) -> None:
    """A11, A3: a batch that was created is no new spending; a key that was never used is."""
    file_id = metered.upload(account=account).json["id"]
    first = create(metered, account, file_id, **{"idempotency-key": "once"})
    metered.set_funds(0, account=account)
    again = create(metered, account, file_id, **{"idempotency-key": "once"})
    assert (first.status, again.status) == (200, 200)
    assert again.body == first.body
    assert refused_for_quota(create(metered, account, file_id, **{"idempotency-key": "twice"}))
    assert refused_for_quota(create(metered, account, file_id))


def test_a_retry_gets_its_answer_though_nothing_is_left(serve: Callable[..., Api]) -> None:
    """A11, A3: the client did not hear of the batch that was created for it; another is a new one."""
    held: list[Held] = []

    def hold(validator: object) -> Held:
        held.append(Held(validator))
        return held[0]

    api = serve(metering=True, wrap_validator=hold)
    file_id, other_id = (api.upload(LINE).json["id"] for _ in range(2))
    body = json.dumps({"input_file_id": file_id, "endpoint": CHAT}).encode()
    with api.connect() as sock:
        sock.sendall(api.head("POST /v1/batches", f"content-length: {len(body)}") + body)
        assert held[0].entered.wait(60)
    wait_until(lambda: api.connections() == 0)
    api.await_(held[0].drop())
    wait_until(lambda: api.requests_in_flight() == 0)
    api.set_funds(0)
    retry = {"x-stainless-retry-count": "1"}
    assert refused_for_quota(create(api, api.account, other_id, **retry))
    again = create(api, api.account, file_id, **retry)
    assert (again.status, again.headers["x-batchline-replayed"]) == (200, "true")


@pytest.mark.rule("F2", "Where it is off, nobody is refused for quota.")
def test_nobody_runs_out_where_nothing_is_metered(api: Api) -> None:
    """A3, F2"""
    account = api.new_account("unmetered")
    api.set_funds(-5, account=account)
    assert api.upload(account=account).status == 200
    assert call(api, CHAT, account).status == 200
    assert [entry.cost for entry in api.usage(account)] == [0]


def test_credentials_come_before_quota(metered: Api, account: Account) -> None:
    """A2, A3: a stranger learns nothing of anybody's funds."""
    metered.set_funds(0, account=account)
    wrong: dict[str, Any] = {"account": Account("bl-wrong", "", account.project_id)}
    assert metered.upload(**wrong).status == 403
    assert metered.post(CHAT, {}, **wrong).status == 403


@pytest.mark.rule("F3", "A key that opened something was used.")
def test_a_key_that_opened_something_was_used(metered: Api, account: Account) -> None:
    """F3: and one that was refused was not."""
    metered.call("GET", "/v1/files", account=Account("bl-wrong", "", account.project_id))
    assert account.key_id not in metered.used
    metered.call("GET", "/v1/files", account=account)
    assert metered.used.count(account.key_id) == 1
