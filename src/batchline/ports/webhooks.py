"""Defines what sends events to webhooks."""

from typing import Protocol

from batchline.domain.webhooks import Message, SendResult


class EventSender(Protocol):
    """Sends events to their receivers."""

    async def send(self, message: Message) -> SendResult:
        """Send an event and return what came of it. Nothing is raised."""
