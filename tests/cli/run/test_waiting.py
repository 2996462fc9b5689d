"""The sentences with which `batchline run` says why lines wait (D11)."""

import time
from typing import Any

import pytest

from batchline.cli.run.waiting import describe_wait, is_unusual
from batchline.client.models import RemoteWait
from batchline.domain.waiting import WaitReason

UPSTREAM = "default"


@pytest.mark.rule("D11", "Each reason has a plain sentence, which names the remedy if there is one.")
@pytest.mark.parametrize(
    ("reason", "fields", "text"),
    [
        (
            "upstream_paused",
            {"upstream": UPSTREAM, "detail": "refused"},
            "waiting: the upstream is paused because it is unavailable (refused)",
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
    assert describe_wait(RemoteWait(reason=reason, **fields)) == text


@pytest.mark.rule("D11", "The end of a wait that the upstream asked for is shown in local time.")
def test_the_end_of_a_wait_is_shown_in_local_time() -> None:
    until = 1_760_000_000
    text = describe_wait(RemoteWait(reason="retry_after", upstream=UPSTREAM, model="x", until=until))
    local = time.strftime("%H:%M:%S", time.localtime(until))
    assert text == f"waiting until {local}, as the upstream asked (Retry-After)"


def test_no_reason_is_without_a_sentence() -> None:
    assert all(describe_wait(RemoteWait(reason=reason)) != f"waiting: {reason}" for reason in WaitReason)


def test_what_any_running_batch_waits_for_is_not_unusual() -> None:
    usual = [RemoteWait(reason="slots", in_flight=4), RemoteWait(reason="retrying"), RemoteWait(reason="queued")]
    unusual = [RemoteWait(reason="slots", in_flight=4, by_other_projects=1), RemoteWait(reason="rate_limit")]
    assert [is_unusual(wait) for wait in usual + unusual] == [False] * 3 + [True] * 2
