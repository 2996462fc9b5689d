"""Stores webhooks, and the deliveries of events to them."""

from collections.abc import Mapping

from msgspec import convert
from msgspec.json import encode as encode_json
from msgspec.structs import asdict

from batchline.domain.states import BatchStatus
from batchline.domain.webhooks import Delivery, DeliveryState, SendResult, Webhook, event_id_of, event_of
from batchline.store.sql import Database, Row, Script, change, one, rows, rows_of_many


class SqlWebhooks:
    """The Webhooks port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create_webhook(self, webhook: Webhook) -> None:
        await self._database.write(lambda: change("insert_webhook", **asdict(webhook)))

    async def webhooks(self) -> list[Webhook]:
        return [_webhook(row) for row in await self._database.read(lambda: rows("webhooks"))]

    async def webhook(self, webhook_id: str) -> Webhook | None:
        row = await self._database.read(lambda: one("webhook", id=webhook_id))
        return None if row is None else _webhook(row)

    async def rotate_webhook(self, webhook_id: str, *, secret: str) -> bool:
        return bool(await self._database.write(lambda: change("rotate_webhook", id=webhook_id, secret=secret)))

    async def delete_webhook(self, webhook_id: str) -> bool:
        def script() -> Script[bool]:
            deleted = yield from change("delete_webhook", id=webhook_id)
            yield from change("delete_deliveries", webhook_id=webhook_id)
            return bool(deleted)

        return await self._database.write(script)

    async def deliveries(self, webhook_id: str, *, limit: int) -> list[Delivery]:
        found = await self._database.read(lambda: rows("deliveries", webhook_id=webhook_id, limit=limit))
        return [convert(dict(row), Delivery) for row in found]

    async def claim_deliveries(
        self, *, lease: int, in_flight: Mapping[str, str], per_project: int, limit: int
    ) -> list[tuple[Webhook, Delivery]]:
        called = encode_json(in_flight).decode()
        due = await self._database.read(
            lambda: rows("due_deliveries", in_flight=called, per_project=per_project, limit=limit)
        )
        if not due:
            return []

        def script() -> Script[list[tuple[Webhook, Delivery]]]:
            claimed = yield from rows_of_many("claim_delivery", [{"id": row["id"], "lease": lease} for row in due])
            found = []
            for row in claimed:
                webhook = yield from one("webhook", id=row["webhook_id"])
                if webhook is not None:
                    found.append((_webhook(webhook), convert(dict(row), Delivery)))
            return found

        return await self._database.write(script)

    async def end_attempt(self, delivery: Delivery, result: SendResult, *, retry_in: int | None) -> None:
        state = DeliveryState.PENDING
        if result.delivered:
            state = DeliveryState.DELIVERED
        elif result.gone or retry_in is None:
            state = DeliveryState.FAILED

        def script() -> Script[None]:
            ended = yield from change(
                "end_attempt",
                id=delivery.id,
                epoch=delivery.epoch,
                state=state,
                wait=retry_in or 0,
                status=result.status,
                detail=result.detail,
            )
            if ended and result.gone:
                yield from change("disable_webhook", id=delivery.webhook_id)
                yield from change("fail_deliveries", webhook_id=delivery.webhook_id)

        await self._database.write(script)

    async def resend_delivery(self, webhook_id: str, delivery_id: int) -> bool:
        resent = await self._database.write(lambda: change("resend_delivery", id=delivery_id, webhook_id=webhook_id))
        return bool(resent)

    async def delete_old_deliveries(self, *, age: int) -> None:
        await self._database.write(lambda: change("delete_old_deliveries", age=age))


def queue_event(batch_id: str, status: BatchStatus) -> Script[None]:
    """Write the event of a batch that this transaction ends, once for each webhook of its project that wants it."""
    yield from change("insert_deliveries", batch_id=batch_id, event_id=event_id_of(batch_id), type=event_of(status))


def _webhook(row: Row) -> Webhook:
    return convert(dict(row), Webhook, strict=False)
