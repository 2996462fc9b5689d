"""``GET /v1/usage``: G9."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator

from batchline.api.openapi.document import describe
from batchline.domain.money import NANO
from batchline.domain.records import Charge, Owner
from batchline.domain.usage import Usage
from tests.support.api_server import Account, Api, BlockedRead

DAY = 86_400
AT = 1_800_000_000 - 1_800_000_000 % DAY


def charge(
    api: Api, account: Account, *, model: str = "m", at: int = AT, cost: int = 0, tokens: int = 10, requests: int = 1
) -> None:
    owner = Owner(key_id=account.key_id, project_id=account.project_id, organization_id=account.organization_id)
    used = Charge(model=model, requests=requests, usage=Usage(input_tokens=tokens, output_tokens=1), cost=cost)
    api.await_(api.store.charge(owner, used, at=at))


def usage(api: Api, query: str = "", *, account: Account | None = None) -> Any:
    reply = api.call("GET", f"/v1/usage?{query}", account=account)
    assert reply.status == 200, reply.body
    components = json.loads(json.dumps(describe(bearer=False)))["components"]
    Draft202012Validator({"components": components, "$ref": "#/components/schemas/UsageReport"}).validate(reply.json)
    return reply.json


@pytest.mark.rule("A4", "A report of usage takes one of the lists of its project.")
def test_a_report_takes_a_place_of_its_project(serve: Callable[..., Api]) -> None:
    held: list[BlockedRead] = []

    def hold(store: Any) -> BlockedRead:
        held.append(BlockedRead(store, "project_usage"))
        return held[0]

    api = serve(wrap_store=hold, max_project_requests=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(api.call, "GET", "/v1/usage")
        assert held[0].entered.wait(60)
        refused = api.call("GET", "/v1/usage")
        api.await_(held[0].release())
        assert (first.result().status, refused.status) == (200, 429)


@pytest.mark.rule("G9", "Usage is summed by bucket and model between two times.")
def test_usage_is_summed_by_bucket_and_model(serve: Callable[..., Api]) -> None:
    api = serve()
    for at in (AT, AT + 3600, AT + 3700, AT + DAY, AT + 40 * DAY):
        charge(api, api.account, at=at)
    charge(api, api.account, model="other", at=AT)
    by_day = usage(api, f"start_time={AT}&end_time={AT + 2 * DAY}")
    assert (by_day["object"], by_day["bucket"]) == ("usage", "day")
    shown = [(row["start_time"], row["model"], row["requests"], row["input_tokens"]) for row in by_day["data"]]
    assert shown == [(AT, "m", 3, 30), (AT, "other", 1, 10), (AT + DAY, "m", 1, 10)]
    by_hour = usage(api, f"bucket=hour&model=m&start_time={AT + 3601}&end_time={AT + DAY}")
    assert [(row["start_time"], row["requests"]) for row in by_hour["data"]] == [(AT + 3600, 2)]
    assert by_hour["start_time"] == AT + 3600
    last_month = usage(api, f"end_time={AT + 40 * DAY + 1}")
    assert [row["start_time"] for row in last_month["data"]] == [AT + 40 * DAY]
    assert last_month["end_time"] - last_month["start_time"] >= 30 * DAY


@pytest.mark.rule("G9", "The money of the organization is shown with metering, and null without.")
def test_money_is_exact_and_null_without_metering(serve: Callable[..., Api], api: Api) -> None:
    metered = serve(metering=True)
    metered.set_funds(2 * NANO)
    charge(metered, metered.account, cost=1)
    reply = metered.call("GET", f"/v1/usage?start_time={AT}&end_time={AT + DAY}")
    assert b'"credits":1.999999999' in reply.body
    assert b'"cost":0.000000001' in reply.body
    assert reply.json["balance"] == 0
    assert (usage(api)["balance"], usage(api)["credits"]) == (None, None)


def test_lines_of_batches_are_counted_apart_from_calls(serve: Callable[..., Api]) -> None:
    api = serve()
    charge(api, api.account, requests=2)
    api.change(
        "INSERT INTO ledger (organization_id, kind, at, balance, credits, key_id, batch_id, model, requests) "
        "VALUES (?, 'usage', ?, 0, 0, ?, 'batch_1', 'm', 5)",
        api.account.organization_id, AT, api.account.key_id,
    )  # fmt: skip
    (row,) = usage(api, f"start_time={AT}&end_time={AT + DAY}")["data"]
    assert (row["lines"], row["requests"]) == (5, 7)


@pytest.mark.rule("A8", "Usage of another project is not shown.")
def test_usage_of_another_project_is_not_shown(serve: Callable[..., Api]) -> None:
    api = serve()
    charge(api, api.new_account("stranger"))
    assert usage(api, f"start_time={AT}&end_time={AT + DAY}")["data"] == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("bucket=week", "bucket"),
        ("start_time=x", "start_time"),
        ("end_time=1.5", "end_time"),
        (f"start_time={AT}&end_time={AT}", "end_time"),
    ],
)
def test_what_cannot_be_asked_for(api: Api, query: str, param: str) -> None:
    reply = api.call("GET", f"/v1/usage?{query}")
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize("query", ["start_time=-5", "end_time=999999999999999999", "start_time=0"])
def test_times_that_are_far_away_are_accepted(api: Api, query: str) -> None:
    usage(api, query)


def test_usage_needs_the_scope_read(api: Api) -> None:
    may, may_not = api.new_account("first", scopes="read"), api.new_account("first", scopes="batch,inference")
    assert usage(api, account=may)["object"] == "usage"
    assert api.call("GET", "/v1/usage", account=may_not).status == 403
