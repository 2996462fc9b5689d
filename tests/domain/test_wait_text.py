"""The sentences that say why lines wait (D11)."""

from typing import Any, get_args

import pytest

from batchline.domain.wait_text import AnyWait, any_wait, describe_wait
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
)

UPSTREAM = "default"
_WAITS: list[Wait] = [
    HeldWait(code="c", message="[legacy:http_400] m", since=1),
    UpstreamPause(upstream="u", detail="refused", since=2, model=None),
    StorageWait(),
    QuarantineWait(upstream="u"),
    RetryAfterWait(upstream="u", model="m", until=3),
    RateLimitWait(upstream="u", model="m", rate=2.0),
    SlotsWait(upstream="u", in_flight=3, limit=4, by_other_projects=1, sync_calls=0),
    RetryWait(lines=1),
    QueueWait(workers=0),
]


def _text(wait: AnyWait) -> str:
    return describe_wait(wait, moment=lambda at: f"<{at}>")


@pytest.mark.rule("D11", "Each reason has a plain sentence, which names the remedy if there is one.")
@pytest.mark.parametrize(
    ("reason", "fields", "text"),
    [
        (
            "upstream_paused",
            {"upstream": UPSTREAM, "detail": "refused"},
            "waiting: the upstream is paused because it is unavailable (no connection)",
        ),
        (
            "upstream_paused",
            {"upstream": "gpu", "model": "x", "detail": "http_429"},
            "waiting: model x of the upstream gpu is paused because it refuses every line (http_429)",
        ),
        (
            "upstream_paused",
            {"upstream": UPSTREAM, "detail": "http_401"},
            "waiting: the upstream does not accept the credentials (http_401); check the API key of the upstream",
        ),
        (
            "upstream_paused",
            {"upstream": "gpu", "detail": "http_403"},
            "waiting: the upstream gpu does not accept the credentials (http_403); check the API key of the upstream",
        ),
        ("storage", {}, "waiting: answers must be stored first, and the storage is slow or unavailable"),
        (
            "quarantine",
            {"upstream": UPSTREAM},
            "waiting: the upstream crashed, and the lines that may have caused it are tried first",
        ),
        (
            "rate_limit",
            {"upstream": UPSTREAM, "model": "x", "rate": 5.0},
            "waiting: the upstream accepts 5 lines a second of model x",
        ),
        (
            "rate_limit",
            {"upstream": UPSTREAM, "model": "x", "rate": 1.0},
            "waiting: the upstream accepts 1 line a second of model x",
        ),
        (
            "rate_limit",
            {"upstream": "gpu", "model": "x", "rate": 1234.5},
            "waiting: the upstream gpu accepts 1,234 lines a second of model x",
        ),
        (
            "rate_limit",
            {"upstream": UPSTREAM, "model": "x"},
            "waiting: the upstream accepts no more lines of model x at the moment",
        ),
        ("slots", {"in_flight": 32, "limit": 32}, "waiting for a slot: all 32 are taken"),
        (
            "slots",
            {"in_flight": 32, "limit": 32, "by_other_projects": 32},
            "waiting for a slot: all 32 are taken by other projects",
        ),
        (
            "slots",
            {"in_flight": 8, "limit": 8, "by_other_projects": 6},
            "waiting for a slot: all 8 are taken, 6 by other projects",
        ),
        ("retrying", {"lines": 1}, "waiting: 1 line will be tried again after a fault"),
        ("retrying", {"lines": 1200}, "waiting: 1,200 lines will be tried again after a fault"),
        ("queued", {"workers": 2}, "waiting for a worker to take the lines"),
        (
            "queued",
            {"workers": 0},
            "waiting: no worker is running; start `batchline serve` or `batchline worker`",
        ),
        ("something_new", {}, "waiting: something_new"),
    ],
)
def test_each_reason_has_a_sentence(reason: str, fields: dict[str, Any], text: str) -> None:
    assert _text(AnyWait(reason=reason, **fields)) == text


def test_every_kind_of_wait_has_a_sentence_of_its_own() -> None:
    assert {type(wait) for wait in _WAITS} == set(get_args(Wait))
    texts = [_text(any_wait(wait)) for wait in _WAITS]
    assert len(set(texts)) == len(_WAITS)
    assert not [text for text in texts if text.removeprefix("waiting: ") in tuple(WaitReason)]


def test_a_hold_and_a_pause_say_since_when_and_why() -> None:
    held, pause = (_text(any_wait(wait)) for wait in _WAITS[:2])
    assert held == "held since <1>, because nearly all lines fail with c: m"
    assert pause == "waiting: the upstream u is paused since <2> because it is unavailable (no connection)"
