"""The objects that say why lines of a batch wait (D11)."""

import pytest
from msgspec.json import decode, encode

from batchline.domain.waiting import (
    HeldWait,
    QuarantineWait,
    QueueWait,
    RateLimitWait,
    RetryAfterWait,
    RetryWait,
    SlotsWait,
    StorageWait,
    UpstreamPause,
    Wait,
    WaitReason,
    stops_all_lines,
)

WAITS: list[tuple[Wait, str]] = [
    (
        HeldWait(code="invalid_request_error", message="no", since=5),
        '{"reason":"held","code":"invalid_request_error","message":"no","since":5}',
    ),
    (
        UpstreamPause(upstream="u", detail="http_401", since=5, model="m"),
        '{"reason":"upstream_paused","upstream":"u","detail":"http_401","since":5,"model":"m"}',
    ),
    (StorageWait(), '{"reason":"storage"}'),
    (QuarantineWait(upstream="u"), '{"reason":"quarantine","upstream":"u"}'),
    (
        RetryAfterWait(upstream="u", model="m", until=7),
        '{"reason":"retry_after","upstream":"u","model":"m","until":7}',
    ),
    (
        RateLimitWait(upstream="u", model="m", rate=2.5),
        '{"reason":"rate_limit","upstream":"u","model":"m","rate":2.5}',
    ),
    (
        SlotsWait(upstream="u", in_flight=7, limit=8, by_other_projects=6, sync_calls=1),
        '{"reason":"slots","upstream":"u","in_flight":7,"limit":8,"by_other_projects":6,"sync_calls":1}',
    ),
    (RetryWait(lines=3), '{"reason":"retrying","lines":3}'),
    (QueueWait(workers=0), '{"reason":"queued","workers":0}'),
]


@pytest.mark.rule("D11", "Each reason to wait has its own fields.")
@pytest.mark.parametrize(("wait", "frozen"), WAITS)
def test_each_reason_to_wait_has_its_own_fields(wait: Wait, frozen: str) -> None:
    assert encode(wait).decode() == frozen
    assert decode(frozen, type=Wait) == wait


def test_every_reason_is_tested() -> None:
    assert {decode(frozen)["reason"] for _, frozen in WAITS} == set(WaitReason)


@pytest.mark.rule("D11", "No end is estimated while a batch is held, an upstream is paused or storage is unavailable.")
def test_an_end_is_estimated_unless_no_line_can_run() -> None:
    stopping = {decode(frozen)["reason"] for wait, frozen in WAITS if stops_all_lines(wait)}
    assert stopping == {"held", "upstream_paused", "storage"}
    assert not stops_all_lines(None)
