"""Webhooks (G10): which URLs are accepted, and how events are signed."""

import json

import pytest
from openai import OpenAI

from batchline.domain.states import BatchStatus
from batchline.domain.webhooks import (
    EVENTS,
    RETRY_SECONDS,
    SendResult,
    Webhook,
    check_url,
    event_id_of,
    event_of,
    message_for,
    new_secret,
    sign,
)

HOOK = Webhook(
    id="wh_1",
    project_id="p",
    url="https://example.org/hook",
    events=",".join(EVENTS),
    secret=new_secret(bytes(range(32))),
    by_operator=False,
    created_at=0,
)


def test_the_signature_is_that_of_standard_webhooks() -> None:
    """The example of the specification's reference implementations."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    signature = sign(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}')
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


@pytest.mark.rule("G10", "The official Python SDK accepts the signature, and the id stays the same over all attempts.")
def test_the_official_client_unwraps_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    client = OpenAI(api_key="unused", webhook_secret=HOOK.secret)
    for at in (1_800_000_000, 1_800_000_305):
        monkeypatch.setattr("openai.lib._webhooks.time.time", lambda at=at: at)
        message = message_for(
            HOOK, event_id="evt_1", kind="batch.completed", subject="batch_1", created_at=1_800_000_000, at=at
        )
        event = client.webhooks.unwrap(message.body, message.headers)
        assert (event.id, event.created_at) == ("evt_1", 1_800_000_000)
        assert event.type == "batch.completed"
        assert event.data.id == "batch_1"
        assert message.headers["webhook-id"] == "evt_1"
        assert json.loads(message.body)["object"] == "event"


def test_every_end_of_a_batch_has_an_event_with_an_id_of_its_own() -> None:
    ends = (BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED)
    assert [event_of(status) for status in ends] == list(EVENTS)
    assert event_id_of("batch_01K9") == "evt_01K9"


@pytest.mark.rule("G10", "A delivery that failed is tried again after 5 s, 5 min, 30 min, 2 h, 5 h, 10 h and 24 h.")
def test_a_failed_delivery_is_retried_seven_times() -> None:
    minute, hour = 60, 3600
    assert list(RETRY_SECONDS) == [5, 5 * minute, 30 * minute, 2 * hour, 5 * hour, 10 * hour, 24 * hour]


@pytest.mark.parametrize(
    ("status", "delivered"), [(200, True), (204, True), (299, True), (199, False), (301, False), (410, False)]
)
def test_only_a_2xx_is_delivered(status: int, delivered: bool) -> None:
    assert SendResult(status=status).delivered is delivered
    assert SendResult(status=status).gone is (status == 410)
    assert not SendResult(detail="refused").delivered


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org",
        "https://example.org:8443/a?b=c",
        "http://127.0.0.1:9/x",
        "http://[::1]/",
        "http://localhost",
    ],
)
def test_urls_that_are_accepted(url: str) -> None:
    check_url(url)


@pytest.mark.rule("G10", "Plain http is accepted only for this machine.")
@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/hook",
        "http://10.0.0.1/hook",
        "http://localhost.example.org/",
        "ftp://example.org",
        "example.org",
        "https://",
        "https://user:word@example.org/",
        "https://example.org/a b",
        "https://example.org/\nx",
        "https://exämple.org/",
        "https://example.org:99999/",
        "https://[::1/",
        "https://example.org/" + "x" * 2048,
    ],
)
def test_urls_that_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        check_url(url)
