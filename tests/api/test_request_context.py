"""One request and its answer, apart from any server: SPEC A14."""

import asyncio
from typing import Any

import pytest

from batchline.api.request_context import RequestContext
from batchline.domain.errors import RequestTimeout

END = {"type": "http.request", "body": b"x", "more_body": False}
GONE = {"type": "http.disconnect"}


def exchange(receive: Any) -> RequestContext:
    async def send(_message: Any) -> None:
        """Into nothing."""

    scope = {"type": "http", "headers": [(b"content-length", b"1")], "state": {}}
    return RequestContext(scope, receive, send, headers={}, stall_seconds=0.01, drain_bytes=1)


def test_only_the_body_has_a_deadline() -> None:
    """A14: whoever waits for the client to leave may wait for ever."""

    async def scenario() -> None:
        left = asyncio.Event()
        messages = iter([END, GONE])

        async def receive() -> Any:
            message = next(messages)
            if message is GONE:
                await left.wait()
            return message

        request = exchange(receive)
        assert await request.receive() == END
        asyncio.get_running_loop().call_later(0.05, left.set)
        assert await request.receive() == GONE

    asyncio.run(scenario())


@pytest.mark.rule("A14", "A body may not stall.")
def test_a_body_that_does_not_come_is_given_up() -> None:
    """A14"""

    async def scenario() -> None:
        async def receive() -> Any:
            await asyncio.Event().wait()

        with pytest.raises(RequestTimeout):
            await exchange(receive).receive()

    asyncio.run(scenario())
