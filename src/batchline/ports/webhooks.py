"""Defines what sends events to webhooks."""

from typing import Protocol

from batchline.domain.webhooks import Message, SendResult


class EventSender(Protocol):
    """Sends events to their receivers."""

    async def send(self, message: Message) -> SendResult:
        """Send an event and return the result. A failure is a result too, and never an exception."""
