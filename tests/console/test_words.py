"""What a batch waits for and what to do, in words."""

from typing import get_args

import pytest

from batchline.console.words import remedy_for, wait_text
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
)

_WAITS = [
    (HeldWait(code="c", message="m", since=0), "Held since"),
    (UpstreamPause(upstream="u", detail="refused", since=0, model=None), "refuses connections"),
    (UpstreamPause(upstream="u", detail="http_503", since=0, model="m"), "Model m at u"),
    (StorageWait(), "must be stored"),
    (QuarantineWait(upstream="u"), "crashed"),
    (RetryAfterWait(upstream="u", model="m", until=0), "asks to wait until"),
    (RateLimitWait(upstream="u", model="m", rate=2.0), "2.0/s start now"),
    (RateLimitWait(upstream="u", model="m", rate=None), "limits the rate"),
    (
        SlotsWait(upstream="u", in_flight=3, limit=4, by_other_projects=1, sync_calls=0),
        "3 of 4 requests in flight, 1 of",
    ),
    (RetryWait(lines=1), "1 line wait"),
    (QueueWait(workers=0), "No worker runs"),
    (QueueWait(workers=2), "wait for a worker"),
]


@pytest.mark.parametrize(("wait", "words"), _WAITS)
def test_a_wait_is_said_in_words(wait: Wait, words: str) -> None:
    assert words in wait_text(wait)


def test_every_kind_of_wait_has_words() -> None:
    assert {type(wait) for wait, _ in _WAITS} == set(get_args(Wait))


def test_every_code_has_a_remedy() -> None:
    assert remedy_for("invalid_request_error") != remedy_for("a code of tomorrow")
