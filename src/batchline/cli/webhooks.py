"""``batchline webhooks``: manages the URLs that get the events of a project. The service may run meanwhile."""

import asyncio
from typing import Any

import click

from batchline.cli.help import Group
from batchline.cli.loading import load_settings
from batchline.cli.options import settings_options
from batchline.cli.output import json_flag, moment, say, show_fields, show_json, show_table
from batchline.cli.store import find_project, in_store, now, store_options
from batchline.domain import ids
from batchline.domain.webhooks import (
    EVENTS,
    TEST_EVENT,
    Delivery,
    SendResult,
    Webhook,
    check_url,
    message_for,
    new_secret,
)
from batchline.ports import Store
from batchline.system import SystemRandom
from batchline.webhooks.sender import HttpSender

_SECRET_BYTES = 32
_MAX_DELIVERIES = 1000


class _Url(click.ParamType[str]):
    """The URL of a receiver."""

    name = "url"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            check_url(value)
        except ValueError as problem:
            self.fail(f"{problem}.", param, ctx)
        return value


class _Events(click.ParamType[str]):
    """Types of events, separated by commas."""

    name = "list"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        named = [event.strip() for event in value.split(",") if event.strip()]
        for event in named:
            if event not in EVENTS:
                self.fail(f"there is no event {event!r}; there are {', '.join(EVENTS)}", param, ctx)
        if not named:
            self.fail("expected at least one event", param, ctx)
        return ",".join(event for event in EVENTS if event in named)


@click.group(cls=Group)
def webhooks() -> None:
    """Send the events of a project's batches to a URL.

    ID is the id of a webhook (wh_...), as `batchline webhooks list` shows it.
    """


@webhooks.command()
@click.argument("url", type=_Url())
@click.option("--project", metavar="PROJECT", default="default", show_default=True, help="Project (id or name).")
@click.option(
    "--events",
    type=_Events(),
    default=",".join(EVENTS),
    show_default=True,
    metavar="LIST",
    help="Events to send, separated by commas.",
)
@json_flag
@store_options
def create(url: str, project: str, events: str, as_json: bool, **flags: Any) -> None:
    """Create a webhook and print its secret, which is not shown again.

    URL begins with https://, or with http:// if it is on this machine.
    """
    random = SystemRandom()

    async def insert(store: Store) -> Webhook:
        found = await find_project(store, project)
        webhook = Webhook(
            id="wh_" + random.bytes(12).hex(),
            project_id=found.id,
            url=url,
            events=events,
            secret=new_secret(random.bytes(_SECRET_BYTES)),
            by_operator=True,
            created_at=now(),
        )
        await store.create_webhook(webhook)
        return webhook

    webhook = in_store(flags, insert)
    shown = {"id": webhook.id, "secret": webhook.secret, "url": url, "events": events, "project_id": webhook.project_id}
    if as_json:
        show_json(shown)
    else:
        show_fields(shown)
        say("Keep the secret: it is not shown again. `batchline webhooks rotate` makes a new one.", err=True)


@webhooks.command("list")
@json_flag
@store_options
def list_webhooks(as_json: bool, **flags: Any) -> None:
    """List all webhooks, without their secrets."""
    found = in_store(flags, lambda store: store.webhooks())
    if as_json:
        show_json(
            [
                {
                    "id": webhook.id,
                    "project_id": webhook.project_id,
                    "url": webhook.url,
                    "events": webhook.events.split(","),
                    "created_at": webhook.created_at,
                    "disabled_at": webhook.disabled_at,
                }
                for webhook in found
            ]
        )
        return
    show_table(
        ("id", "project_id", "url", "events", "disabled_at"),
        [
            (webhook.id, webhook.project_id, webhook.url, webhook.events, moment(webhook.disabled_at))
            for webhook in found
        ],
    )


@webhooks.command()
@click.argument("webhook_id", metavar="ID")
@store_options
def delete(webhook_id: str, **flags: Any) -> None:
    """Delete a webhook. Events that were not delivered yet are dropped."""
    if not in_store(flags, lambda store: store.delete_webhook(webhook_id)):
        raise _unknown(webhook_id)
    click.echo(f"Deleted {webhook_id}.")


@webhooks.command()
@click.argument("webhook_id", metavar="ID")
@json_flag
@store_options
def rotate(webhook_id: str, as_json: bool, **flags: Any) -> None:
    """Give a webhook a new secret and print it.

    The next delivery is signed with it. A receiver that still has the former one refuses the event, and gets it again
    5 seconds and 5 minutes later.
    """
    secret = new_secret(SystemRandom().bytes(_SECRET_BYTES))
    if not in_store(flags, lambda store: store.rotate_webhook(webhook_id, secret=secret)):
        raise _unknown(webhook_id)
    shown = {"id": webhook_id, "secret": secret}
    (show_json if as_json else show_fields)(shown)


@webhooks.command()
@click.argument("webhook_id", metavar="ID")
@click.option(
    "--limit",
    type=click.IntRange(1, _MAX_DELIVERIES),
    metavar="N",
    default=20,
    show_default=True,
    help="How many to show.",
)
@json_flag
@store_options
def deliveries(webhook_id: str, limit: int, as_json: bool, **flags: Any) -> None:
    """List the last deliveries to a webhook, newest first. Those that ended are kept for 7 days."""

    async def read(store: Store) -> list[Delivery]:
        if await store.webhook(webhook_id) is None:
            raise _unknown(webhook_id)
        return await store.deliveries(webhook_id, limit=limit)

    found = in_store(flags, read)
    if as_json:
        show_json([_fields(delivery) for delivery in found])
        return
    show_table(
        ("event", "type", "batch", "state", "attempts", "answer", "next_at"),
        [
            (
                delivery.event_id,
                delivery.type,
                delivery.batch_id,
                delivery.state,
                str(delivery.attempts),
                str(delivery.status or delivery.detail or "-"),
                moment(delivery.next_at if delivery.ended_at is None else None),
            )
            for delivery in found
        ],
    )


@webhooks.command()
@click.argument("webhook_id", metavar="ID")
@store_options
@settings_options("webhook_private")
def test(webhook_id: str, webhook_private: str | None, **flags: Any) -> None:
    """Send a test event now and say what the receiver answered. Its type is webhook.test.

    This machine sends it, which may reach other addresses than the machines of the service do.
    """
    settings = load_settings(**flags, webhook_private=webhook_private)
    webhook = in_store(flags, lambda store: store.webhook(webhook_id))
    if webhook is None:
        raise _unknown(webhook_id)
    result = asyncio.run(_send_test(webhook, allows_private=settings.webhook_private))
    if not result.delivered:
        raise click.ClickException(f"Not delivered: {result.detail or f'the receiver answered {result.status}'}.")
    click.echo(f"Delivered: the receiver answered {result.status}.")


async def _send_test(webhook: Webhook, *, allows_private: bool) -> SendResult:
    at = now()
    event_id = "evt_" + ids.ulid(at, SystemRandom().bytes(10))
    message = message_for(webhook, event_id=event_id, kind=TEST_EVENT, subject=webhook.id, created_at=at, at=at)
    return await HttpSender(allows_private=allows_private).send(message)


def _fields(delivery: Delivery) -> dict[str, str | int | None]:
    return {
        "event_id": delivery.event_id,
        "type": delivery.type,
        "batch_id": delivery.batch_id,
        "state": delivery.state,
        "attempts": delivery.attempts,
        "status": delivery.status,
        "detail": delivery.detail,
        "created_at": delivery.created_at,
        "next_at": delivery.next_at if delivery.ended_at is None else None,
        "ended_at": delivery.ended_at,
    }


def _unknown(webhook_id: str) -> click.ClickException:
    return click.ClickException(f"There is no webhook {webhook_id!r}. List all with: batchline webhooks list")
