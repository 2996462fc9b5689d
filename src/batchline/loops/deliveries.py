"""Delivers events to webhooks, at least once: each is a row that the end of its batch wrote (G10).

An attempt moves the time of the next one ahead before it begins. If this process dies meanwhile, another one tries
again after that time. From each process a webhook gets one event at a time and a project a few, so slow receivers do
not hold up others.
"""

import asyncio
import logging

from batchline.domain.errors import StoreDown
from batchline.domain.webhooks import RETRY_SECONDS, TIMEOUT_SECONDS, Delivery, SendResult, Webhook, message_for
from batchline.loops.periodic import PeriodicTask
from batchline.ports import Clock, EventSender, Webhooks
from batchline.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_LEASE_SECONDS = int(TIMEOUT_SECONDS) + 5
"""The time after which an attempt of a process that died is made again."""
_MAX_IN_FLIGHT = 16
_MAX_PROJECT_IN_FLIGHT = 4
"""The most webhooks of one project that are called at once, so that the slow ones of a few projects leave room for the
events of others."""
_KEPT_SECONDS = 7 * 86_400
"""The time for which ended deliveries are kept."""
_CLEANUP_SECONDS = 3600.0


class Deliveries:
    """The deliveries that this process makes. It looks for due ones every ``every`` seconds."""

    def __init__(self, *, store: Webhooks, sender: EventSender, clock: Clock, metrics: Metrics, every: float) -> None:
        self._store, self._sender, self._clock, self._metrics = store, sender, clock, metrics
        self._in_flight: dict[str, str] = {}
        """The webhooks that are being called, with the project of each."""
        self._group = asyncio.TaskGroup()
        self._task = PeriodicTask("webhooks", self.step, every=every, clock=clock)
        self._cleanup_at = 0.0

    def wake(self) -> None:
        """Look for due deliveries now: a batch has ended."""
        self._task.wake()

    async def run(self) -> None:
        """Run until cancelled. Deliveries in flight are tried again by another process, or after the next start."""
        async with self._group:
            await self._task.run()

    async def step(self) -> bool:
        """Begin the deliveries that are due."""
        room = _MAX_IN_FLIGHT - len(self._in_flight)
        if room <= 0:
            return False
        claimed = await self._store.claim_deliveries(
            lease=_LEASE_SECONDS, in_flight=self._in_flight, per_project=_MAX_PROJECT_IN_FLIGHT, limit=room
        )
        for webhook, delivery in claimed:
            self._in_flight[webhook.id] = webhook.project_id
            self._group.create_task(self._deliver(webhook, delivery))
        if self._clock.steady() >= self._cleanup_at:
            self._cleanup_at = self._clock.steady() + _CLEANUP_SECONDS
            await self._store.delete_old_deliveries(age=_KEPT_SECONDS)
        return False

    async def _deliver(self, webhook: Webhook, delivery: Delivery) -> None:
        try:
            result = await self._sender.send(
                message_for(
                    webhook,
                    event_id=delivery.event_id,
                    kind=delivery.type,
                    subject=delivery.batch_id,
                    created_at=delivery.created_at,
                    at=int(self._clock.now()),
                )
            )
            await self._end(webhook, delivery, result)
        except StoreDown as error:
            log.warning(
                "failed to record a delivery, it will be made again",
                extra={"webhook": webhook.id, "event": delivery.event_id, "reason": str(error)},
            )
        except Exception:
            log.exception(
                "failed to deliver an event, it will be tried again",
                extra={"webhook": webhook.id, "event": delivery.event_id},
            )
        finally:
            self._in_flight.pop(webhook.id, None)
        self.wake()

    async def _end(self, webhook: Webhook, delivery: Delivery, result: SendResult) -> None:
        retry_in = RETRY_SECONDS[delivery.attempts] if delivery.attempts < len(RETRY_SECONDS) else None
        await self._store.end_attempt(delivery, result, retry_in=retry_in)
        fields = {"webhook": webhook.id, "event": delivery.event_id, "batch": delivery.batch_id}
        if result.delivered:
            self._metrics.webhook_deliveries.labels("delivered").inc()
            log.info("event delivered", extra=fields)
            return
        reason = {"reason": result.detail or f"HTTP {result.status}"}
        if result.gone:
            self._metrics.webhook_deliveries.labels("gone").inc()
            log.warning("receiver is gone, disabling the webhook", extra=fields)
        elif retry_in is None:
            self._metrics.webhook_deliveries.labels("given_up").inc()
            log.error("failed to deliver an event for the last time, giving it up", extra=fields | reason)
        else:
            self._metrics.webhook_deliveries.labels("failed").inc()
            log.warning("failed to deliver an event, retrying", extra=fields | reason | {"retry_in": retry_in})
