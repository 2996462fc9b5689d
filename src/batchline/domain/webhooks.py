"""Defines webhooks: the events, their bodies and signatures, and when a delivery that failed is tried again (G10).

The signature is that of Standard Webhooks: HMAC-SHA256 over the id, the time and the body. It is written here because
the package of that name brings a client for another service, with its dependencies.
"""

import hmac
from base64 import b64decode, b64encode
from enum import StrEnum
from hashlib import sha256
from ipaddress import ip_address
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.json import encode as encode_json

from batchline.domain.states import BatchStatus

EVENTS = ("batch.completed", "batch.failed", "batch.expired", "batch.cancelled")
TEST_EVENT = "webhook.test"
"""The event of ``batchline webhooks test``. No batch has it, so a receiver does nothing by it."""

RETRY_SECONDS = (5, 300, 1800, 7200, 18_000, 36_000, 86_400)
"""The waits after each attempt that failed. After the last of these attempts a delivery is given up."""
TIMEOUT_SECONDS = 15.0
"""The time in which a receiver must answer, with the connection."""
MAX_URL_CHARACTERS = 2048

_SECRET_PREFIX = "whsec_"  # noqa: S105 (the prefix of every secret)


class DeliveryState(StrEnum):
    PENDING = "pending"
    DELIVERED = "delivered"
    FAILED = "failed"
    """It was tried for the last time, or its webhook was disabled."""


class Webhook(Struct, frozen=True, kw_only=True):
    """A URL that gets the events of a project."""

    id: str
    project_id: str
    url: str
    events: str
    """Types of events, separated by commas."""
    secret: str
    by_operator: bool
    """Whether a command of the operator made it: only these may name this machine."""
    created_at: int
    disabled_at: int | None = None


class Delivery(Struct, frozen=True, kw_only=True):
    """An event on its way to one webhook."""

    id: int
    webhook_id: str
    event_id: str
    type: str
    batch_id: str
    created_at: int
    state: DeliveryState = DeliveryState.PENDING
    epoch: int = 0
    attempts: int = 0
    next_at: int = 0
    ended_at: int | None = None
    status: int | None = None
    """The status of the last answer; None if there was none."""
    detail: str | None = None
    """The reason why the last attempt failed. No part of the receiver's answer is kept."""


class Message(Struct, frozen=True, kw_only=True):
    """A signed event, ready to be sent."""

    url: str
    by_operator: bool
    headers: dict[str, str]
    body: bytes


class SendResult(Struct, frozen=True, kw_only=True):
    """The result of an attempt: the status of the answer, or the reason why there was none."""

    status: int | None = None
    detail: str | None = None

    @property
    def delivered(self) -> bool:
        """Whether the receiver accepted the event."""
        return self.status is not None and 200 <= self.status < 300

    @property
    def gone(self) -> bool:
        """Whether the receiver wants no more events."""
        return self.status == 410


def event_of(status: BatchStatus) -> str:
    """Return the event of a batch that ended with this status."""
    return f"batch.{status}"


def event_id_of(batch_id: str) -> str:
    """Return the id of the event of a batch.

    A batch ends once, so the id follows from the batch. Also a database that lost its last commits makes the same one.
    """
    return f"evt_{batch_id.removeprefix('batch_')}"


def new_secret(entropy: bytes) -> str:
    """Return a signing secret."""
    return _SECRET_PREFIX + b64encode(entropy).decode()


def message_for(webhook: Webhook, *, event_id: str, kind: str, subject: str, created_at: int, at: int) -> Message:
    """Return an event as it is sent at a time. The id is the same for every attempt, the time and signature are not."""
    event = {"id": event_id, "object": "event", "created_at": created_at, "type": kind, "data": {"id": subject}}
    body = encode_json(event)
    return Message(
        url=webhook.url,
        by_operator=webhook.by_operator,
        headers={
            "content-type": "application/json",
            "webhook-id": event_id,
            "webhook-timestamp": str(at),
            "webhook-signature": sign(webhook.secret, event_id, at, body),
        },
        body=body,
    )


def sign(secret: str, event_id: str, at: int, body: bytes) -> str:
    """Return the signature of an event, as Standard Webhooks defines it."""
    key = b64decode(secret.removeprefix(_SECRET_PREFIX))
    digest = hmac.new(key, b"%b.%d.%b" % (event_id.encode(), at, body), sha256).digest()
    return f"v1,{b64encode(digest).decode()}"


def check_url(url: str) -> None:
    """Raise ValueError, with a sentence for the user, unless the URL can be a webhook's."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise ValueError("It is not a URL") from None
    if len(url) > MAX_URL_CHARACTERS or not url.isascii() or not url.isprintable() or " " in url:
        raise ValueError(f"A URL has at most {MAX_URL_CHARACTERS} printable ASCII characters and no spaces")
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError("It must begin with https://, or with http:// and the address of this machine")
    if parts.username is not None or parts.password is not None:
        raise ValueError("It must not contain a user or a password: they would stand in lists and logs")
    if parts.scheme == "http" and not _names_loopback(host):
        raise ValueError("Plain http is allowed only to this machine; use https://")


def _names_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
