"""The optional fields of a create: G1, G11."""

from typing import Any

import pytest
from msgspec import Raw

from batchline.api.create_fields import read_extension
from tests.support.api_server import CHAT, Api

HOUR, MONTH = 3600, 2_592_000


@pytest.fixture(scope="module")
def file_id(api: Api) -> str:
    return str(api.upload().json["id"])


@pytest.mark.rule("G1", "Unknown names and wrong types are refused with the name in param.")
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([], "batchline"),
        ("hold", "batchline"),
        ({"hold": 1}, "batchline.hold"),
        ({"hold": None}, "batchline.hold"),
        ({"hold": "true"}, "batchline.hold"),
        ({"hold": True, "held": True}, "batchline.held"),
        ({"reuse": "yes"}, "batchline.reuse"),
        ({"max_cost": True}, "batchline.max_cost"),
        ({"max_cost": "5"}, "batchline.max_cost"),
        ({"max_cost": -1}, "batchline.max_cost"),
        ({"max_cost": 10**30}, "batchline.max_cost"),
        ({"max_cost": None}, "batchline.max_cost"),
        ({"x" * 1000: 1}, f"batchline.{'x' * 200}"),
    ],
)
def test_what_batchline_may_not_contain(api: Api, file_id: str, given: Any, param: str) -> None:
    reply = api.create(input_file_id=file_id, endpoint=CHAT, batchline=given)
    assert reply.status == 400
    assert reply.error["param"] == param


@pytest.mark.rule("G8", "Without metering a limit of the cost is refused.")
def test_a_limit_of_the_cost_needs_metering(api: Api, file_id: str) -> None:
    error = api.create(input_file_id=file_id, endpoint=CHAT, batchline={"max_cost": 2.5}).error
    assert error["param"] == "batchline.max_cost"
    assert "metering" in error["message"]


@pytest.mark.parametrize("number", [b"1e-99999999999999999999", b"0e99999999999999999999", b"-0.0", b"1e-10"])
def test_a_limit_of_the_cost_may_have_any_exponent(number: bytes) -> None:
    """G1: JSON has no limit for exponents, and a number below a nano-unit is no fault of the service."""
    assert read_extension({"batchline": Raw(b'{"max_cost":%b}' % number)}).max_cost == 0


@pytest.mark.parametrize("given", [None, {}, {"hold": False}, {"hold": True}, {"reuse": True, "hold": True}])
def test_valid_options_of_a_create_are_accepted(api: Api, file_id: str, given: Any) -> None:
    batch = api.create(input_file_id=file_id, endpoint=CHAT, batchline=given).json
    assert batch["status"] == "in_progress"
    assert "hold" not in batch


@pytest.mark.rule("G11", "output_expires_after must have the anchor created_at and 3600 to 2592000 seconds.")
@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([], "output_expires_after"),
        (7200, "output_expires_after"),
        ({}, "output_expires_after.anchor"),
        ({"seconds": HOUR}, "output_expires_after.anchor"),
        ({"anchor": "completed_at", "seconds": HOUR}, "output_expires_after.anchor"),
        ({"anchor": "created_at"}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": HOUR - 1}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": MONTH + 1}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": "3600"}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": 3600.5}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": True}, "output_expires_after.seconds"),
        ({"anchor": "created_at", "seconds": HOUR, "hours": 1}, "output_expires_after.hours"),
    ],
)
def test_what_the_expiry_of_results_may_not_be(api: Api, file_id: str, given: Any, param: str) -> None:
    reply = api.create(input_file_id=file_id, endpoint=CHAT, output_expires_after=given)
    assert reply.status == 400
    assert reply.error["param"] == param


@pytest.mark.parametrize("seconds", [HOUR, MONTH])
def test_the_expiry_of_results_is_kept_with_the_batch(api: Api, file_id: str, seconds: int) -> None:
    expiry = {"anchor": "created_at", "seconds": seconds}
    batch = api.create(input_file_id=file_id, endpoint=CHAT, output_expires_after=expiry).json
    stored = api.await_(api.store.batch(api.account.project_id, batch["id"]))
    assert stored is not None
    assert stored.output_lifetime == seconds


def test_a_create_with_another_option_is_another_create(api: Api, file_id: str) -> None:
    """A11: an Idempotency-Key stands for one body."""
    headers = {"idempotency-key": "one body"}
    first = api.create(headers, input_file_id=file_id, endpoint=CHAT)
    again = api.create(headers, input_file_id=file_id, endpoint=CHAT, batchline={"hold": False})
    assert first.json["id"] == again.json["id"]
    other = api.create(headers, input_file_id=file_id, endpoint=CHAT, batchline={"hold": True})
    assert other.error["code"] == "idempotency_key_reused"
