"""Sends lists. A list is held in memory whole until its client has read it, so a project may have few at once."""

from collections.abc import Awaitable, Callable
from functools import partial

from msgspec.json import encode as encode_json
from starlette.types import ASGIApp, Receive, Scope, Send

from batchline.api.content import json_content
from batchline.api.throttle import Throttle
from batchline.domain.records import Owner


class Lists:
    """Sends the lists of all projects. ``limit`` is the number that one project may have under way."""

    def __init__(self, *, limit: int) -> None:
        self._throttle = Throttle(limit, of="lists", bound="project_lists")

    def answer(self, owner: Owner, read: Callable[[], Awaitable[object]]) -> ASGIApp:
        """Return an answer that reads a list and sends it, while the project has a slot for it."""
        return partial(self._send, owner.project_id, read)

    async def _send(
        self, project_id: str, read: Callable[[], Awaitable[object]], scope: Scope, receive: Receive, send: Send
    ) -> None:
        with self._throttle.slot(project_id):
            await json_content(encode_json(await read()))(scope, receive, send)
