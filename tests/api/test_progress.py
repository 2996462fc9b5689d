"""``GET /v1/batches/{id}/progress``: shape, states, and who may see it. A8, A12, C8, C11, D11."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator

from batchline.api.openapi.document import describe
from batchline.domain.bitmap import all_but
from batchline.domain.outcomes import TOO_LONG, error_line
from batchline.domain.progress import count_errors
from batchline.domain.records import Segment, Shard, ShardProgress
from batchline.domain.usage import Usage
from tests.support.api_server import CHAT, LINE, TIMEOUT_SECONDS, Api, Held

NOTHING: dict[str, Any] = {"rate": 0, "eta": None, "waiting_for": None, "in_flight": 0, "errors": []}


def _created(api: Api, data: bytes) -> str:
    reply = api.create(input_file_id=api.upload(data).json["id"], endpoint=CHAT)
    return str(reply.json["id"] if reply.status == 200 else reply.headers["x-batch-id"])


def _progress(api: Api, batch_id: str) -> Any:
    """As described, and of the same mind as the batch."""
    reply = api.call("GET", f"/v1/batches/{batch_id}/progress")
    assert reply.status == 200
    components = json.loads(json.dumps(describe(bearer=False)))["components"]
    schema = {"components": components, "$ref": "#/components/schemas/BatchProgress"}
    Draft202012Validator(schema).validate(reply.json)
    batch = api.call("GET", f"/v1/batches/{batch_id}").json
    assert (reply.json["object"], reply.json["batch_id"]) == ("batch.progress", batch_id)
    assert all(reply.json[name] == batch[name] for name in ("status", "request_counts", "usage"))
    return reply.json


def _lines(count: int) -> bytes:
    return b"".join(LINE.replace(b'"a"', b'"line-%d"' % n) for n in range(count))


def _record(api: Api, batch_id: str) -> None:
    """One line that failed, one that did not."""
    now = int(api.clock.now())
    claim = api.await_(api.store.claim(owner="test", lease=30, lines=1000, bytes=1 << 20, alone=True, at=now))
    progress = [_moved_on(shard, failed=failed) for shard, failed in zip(claim.shards, (0, 1), strict=False)]
    errors = count_errors([error_line("batch_req_1", b'"line-1"', TOO_LONG)])
    segment = Segment(output_bytes=0, error_bytes=0, data=b"")
    api.await_(api.store.record(batch_id, owner="test", progress=progress, segment=segment, errors=errors, at=now))


def _moved_on(shard: Shard, *, failed: int) -> ShardProgress:
    """By its first line."""
    return ShardProgress(
        n=shard.n,
        epoch=shard.epoch,
        former=shard.settled,
        settled=all_but(list(range(1, shard.lines)), shard.lines),
        completed=1 - failed,
        failed=failed,
        usage=Usage(input_tokens=7, output_tokens=3) if not failed else Usage(),
        done=shard.lines == 1,
    )


@pytest.mark.rule("D11", "A batch that no worker has taken yet says so, with the number of workers.")
def test_a_batch_that_has_just_begun_waits_for_a_worker(api: Api) -> None:
    told = _progress(api, _created(api, LINE))
    assert told["status"] == "in_progress"
    assert {name: told[name] for name in NOTHING} == NOTHING | {"waiting_for": {"reason": "queued", "workers": 0}}


@pytest.mark.rule("D11", "A batch whose input is validated waits for that.")
def test_a_batch_that_is_validated_waits(serve: Callable[..., Api]) -> None:
    held: list[Held] = []

    def hold(validator: Any) -> Held:
        held.append(Held(validator))
        return held[0]

    api = serve(wrap_validator=hold)
    file_id = api.upload(LINE).json["id"]
    with ThreadPoolExecutor(1) as pool:
        creating = pool.submit(lambda: api.create(input_file_id=file_id, endpoint=CHAT))
        assert held[0].entered.wait(TIMEOUT_SECONDS)
        (batch,) = api.call("GET", "/v1/batches").json["data"]
        told = _progress(api, batch["id"])
        api.await_(held[0].drop())
        creating.result(TIMEOUT_SECONDS)
    assert (told["status"], told["waiting_for"]) == ("validating", {"reason": "queued", "workers": 0})


def test_progress_tells_of_rate_end_errors_and_tokens(serve: Callable[..., Api]) -> None:
    """C8: as soon as lines are recorded."""
    api = serve()
    batch_id = _created(api, _lines(10))
    _record(api, batch_id)
    told = _progress(api, batch_id)
    assert told["request_counts"] == {"total": 10, "completed": 1, "failed": 1}
    assert told["rate"] > 0
    assert told["eta"].keys() == {"seconds", "low", "high"}
    assert 0 <= told["eta"]["low"] < told["eta"]["seconds"] < told["eta"]["high"]
    assert told["usage"]["total_tokens"] == 10
    (error,) = told["errors"]
    assert (error["code"], error["count"]) == ("context_length_exceeded", 1)
    assert error["sample"] == {"custom_id": "line-1", "message": f"[legacy:http_400] {TOO_LONG.message}"}


def test_no_end_is_estimated_for_a_cancelled_batch(serve: Callable[..., Api]) -> None:
    """C10: lines that did not run will not."""
    api = serve()
    batch_id = _created(api, _lines(10))
    _record(api, batch_id)
    api.call("POST", f"/v1/batches/{batch_id}/cancel")
    told = _progress(api, batch_id)
    assert (told["status"], told["eta"], told["waiting_for"]) == ("cancelling", None, None)


def test_a_batch_that_failed_has_nothing_to_tell(api: Api) -> None:
    """C3: its errors are those of its input, which the batch shows."""
    told = _progress(api, _created(api, b"not json\n"))
    assert told["status"] == "failed"
    assert {name: told[name] for name in NOTHING} == NOTHING


@pytest.mark.parametrize("batch_id", ["batch_01ARZ3NDEKTSV4RRFFQ69G5FAV", "x", "%00"])
def test_progress_of_nothing_is_told_as_the_batch_itself(api: Api, batch_id: str) -> None:
    """A8, C8"""
    progress, batch = (api.call("GET", f"/v1/batches/{batch_id}{part}") for part in ("/progress", ""))
    assert (progress.status, progress.body) == (batch.status, batch.body)
    assert progress.status == 404


def test_an_empty_id_is_told_so(api: Api) -> None:
    """A12"""
    reply = api.call("GET", "/v1/batches//progress")
    assert reply.status == 400
    assert reply.error["param"] == "batch_id"


def test_progress_wants_credentials_and_no_other_method(api: Api) -> None:
    """A1, A6"""
    batch_id = _created(api, LINE)
    assert api.call("GET", f"/v1/batches/{batch_id}/progress", anonymous=True).status == 401
    assert api.call("POST", f"/v1/batches/{batch_id}/progress").status == 405
    assert api.call("GET", f"/v1/batches/{batch_id}/progress", account=api.new_account("other")).status == 404
