"""``POST /v1/batches/check``: G5."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator

from batchline.api.openapi.document import describe
from tests.support.api_server import CHAT, Api, Reply

PRICES = {"input_price": "1", "output_price": "10"}


def line(n: int, *, model: str | None = "m", text: str = "hi", **body: Any) -> bytes:
    named = {} if model is None else {"model": model}
    request = {**named, "messages": [{"role": "user", "content": text}], **body}
    return json.dumps({"custom_id": str(n), "method": "POST", "url": CHAT, "body": request}).encode() + b"\n"


def check(api: Api, data: bytes, **fields: Any) -> Reply:
    body = {"input_file_id": api.upload(data).json["id"], "endpoint": CHAT, **fields}
    return api.post("/v1/batches/check", body)


def checked(api: Api, data: bytes) -> Any:
    reply = check(api, data)
    assert reply.status == 200, reply.body
    components = json.loads(json.dumps(describe(bearer=False)))["components"]
    Draft202012Validator({"components": components, "$ref": "#/components/schemas/BatchCheck"}).validate(reply.json)
    return reply.json


@pytest.mark.rule("G5", "A valid input gets its lines, models, tokens and equal lines, and nothing is stored.")
def test_a_valid_input_is_surveyed_and_nothing_is_stored(serve: Callable[..., Api]) -> None:
    api = serve()
    data = line(1, max_tokens=10) + line(2, max_tokens=10) + line(3, model="other", text="x" * 400)
    found = checked(api, data)
    assert (found["object"], found["valid"], found["errors"]) == ("batch.check", True, None)
    assert (found["lines"], found["duplicates"], found["seconds"]) == (3, 1, None)
    first, second = found["models"]
    assert (first["model"], first["lines"], first["enabled"], first["estimated"]) == ("m", 2, True, True)
    assert (first["output_tokens_at_most"], first["cost_at_most"]) == (20, None)
    assert 10 < first["input_tokens"] < 100
    assert (second["model"], second["output_tokens_at_most"]) == ("other", None)
    assert second["input_tokens"] > 100
    assert api.call("GET", "/v1/batches").json["data"] == []
    assert len(api.call("GET", "/v1/files").json["data"]) == 1
    assert not list((api.folder / "objects").rglob("work/*"))


@pytest.mark.rule("G5", "An invalid input gets every fault as a failed batch would have it.")
def test_an_invalid_input_gets_its_faults(api: Api) -> None:
    data = line(1) + b"not json\n" + line(1)
    found = checked(api, data)
    assert (found["valid"], found["lines"], found["models"], found["seconds"]) == (False, 0, [], None)
    created = api.create(input_file_id=api.upload(data).json["id"], endpoint=CHAT)
    failed = api.call("GET", f"/v1/batches/{created.headers['x-batch-id']}").json
    assert found["errors"] == failed["errors"]
    assert [fault["line"] for fault in found["errors"]["data"]] == [2, 3]


def test_a_fault_of_the_request_is_answered_as_a_create_answers_it(api: Api) -> None:
    assert api.post("/v1/batches/check", {"endpoint": CHAT}).error["param"] == "input_file_id"
    missing = api.post("/v1/batches/check", {"input_file_id": "file-none", "endpoint": CHAT})
    assert (missing.status, missing.error["message"]) == (404, "Input file not found: file-none")
    assert check(api, line(1), completion_window="1h").error["param"] == "completion_window"
    assert check(api, line(1), batchline={"hold": 1}).error["param"] == "batchline.hold"
    assert not check(api, line(1), endpoint="/v1/embeddings").json["valid"]
    assert api.call("GET", "/v1/batches/check").status == 405


@pytest.mark.rule("G5", "The cost is at most what the prices and the limits of the lines give.")
def test_models_and_costs_are_those_of_the_project(serve: Callable[..., Api]) -> None:
    api = serve(metering=True, models={"m": PRICES, "private": {"projects": ["another"]}})
    found = checked(api, line(1, max_tokens=1000) + line(2, model="private") + line(3, model=None) + line(4, model="x"))
    by_name = {model["model"]: model for model in found["models"]}
    assert {name: model["enabled"] for name, model in by_name.items()} == {
        "": False, "m": True, "private": False, "x": False,
    }  # fmt: skip
    tokens = by_name["m"]["input_tokens"]
    assert by_name["m"]["cost_at_most"] == pytest.approx((tokens * 1 + 1000 * 10) / 1e6 / 2)
    assert by_name["x"]["cost_at_most"] is None


@pytest.mark.rule("G5", "A limit of the cost that a create would refuse is refused.")
def test_a_limit_of_the_cost_needs_metering_and_prices_as_in_a_create(serve: Callable[..., Api]) -> None:
    limited = {"batchline": {"max_cost": 2.5}}
    free = check(serve(), line(1), **limited)
    assert (free.status, free.error["message"]) == (400, "batchline.max_cost needs metering, which is off")
    priced = serve(metering=True, models={"m": PRICES, "free": {}})
    assert check(priced, line(1), **limited).json["valid"]
    refused = check(priced, line(1) + line(2, model="free"), **limited)
    assert (refused.status, refused.error["param"]) == (400, "batchline.max_cost")
    created = priced.create(input_file_id=priced.upload(line(1, model="free")).json["id"], endpoint=CHAT, **limited)
    assert (created.status, created.error) == (refused.status, refused.error)


@pytest.mark.rule("G5", "The time is estimated by the last batches of the same models.")
def test_the_time_is_estimated_by_the_last_batches(serve: Callable[..., Api]) -> None:
    api = serve()
    batch_id = api.create(input_file_id=api.upload(line(1)).json["id"], endpoint=CHAT).json["id"]
    api.change(
        "UPDATE batches SET status = 'completed', total = 100, completed_at = in_progress_at + 50 WHERE id = ?",
        batch_id,
    )
    assert checked(api, b"".join(line(n) for n in range(40)))["seconds"] == {"low": 20, "high": 20}
    assert checked(api, line(1, model="other"))["seconds"] is None


def test_a_key_that_may_only_read_may_not_check(api: Api) -> None:
    reader = api.new_account("first", scopes="read")
    reply = api.post("/v1/batches/check", {"input_file_id": "file-x", "endpoint": CHAT}, account=reader)
    assert reply.status == 403
