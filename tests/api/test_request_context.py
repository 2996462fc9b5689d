"""The context of one request, without a server: A14."""

import asyncio
from typing import Any

import pytest

from batchline.api.request_context import RequestContext
from batchline.domain.errors import RequestTimeout

pytestmark = pytest.mark.anyio

END = {"type": "http.request", "body": b"x", "more_body": False}
DISCONNECT = {"type": "http.disconnect"}


def request_context(receive: Any) -> RequestContext:
    async def send(_message: Any) -> None:
        """Drop the message."""

    scope = {"type": "http", "headers": [(b"content-length", b"1")], "state": {}}
    return RequestContext(scope, receive, send, headers={}, stall_seconds=0.01, drain_bytes=1)


async def test_only_the_body_has_a_deadline() -> None:
    """A14: waiting for the client to disconnect may take any time."""
    left = asyncio.Event()
    messages = iter([END, DISCONNECT])

    async def receive() -> Any:
        message = next(messages)
        if message is DISCONNECT:
            await left.wait()
        return message

    request = request_context(receive)
    assert await request.receive() == END
    asyncio.get_running_loop().call_later(0.05, left.set)
    assert await request.receive() == DISCONNECT


@pytest.mark.rule("A14", "A body may not stall.")
async def test_a_body_that_does_not_come_is_given_up() -> None:
    """A14"""

    async def receive() -> Any:
        await asyncio.Event().wait()

    with pytest.raises(RequestTimeout):
        await request_context(receive).receive()
