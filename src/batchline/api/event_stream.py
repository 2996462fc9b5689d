"""Sends server-sent events for as long as the client reads them and its key is valid."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Without this, a proxy may buffer the stream and pass it on all at once.
    (b"x-accel-buffering", b"no"),
]


async def first_of(*coroutines: Coroutine[Any, Any, None]) -> int:
    """Run coroutines until one ends, cancel the others, and return the position of the one that ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
            ended, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in others:
                task.cancel()
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return min(tasks.index(task) for task in ended)


async def wait_for_disconnect(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
