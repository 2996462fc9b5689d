"""The context of one request, without a server: A14."""

import asyncio
from contextlib import nullcontext, suppress
from typing import Any

import pytest

from batchline.api.request_context import RequestContext, client_state_of, is_authenticated
from batchline.domain.errors import RequestTimeout

pytestmark = pytest.mark.anyio

END = {"type": "http.request", "body": b"x", "more_body": False}
DISCONNECT = {"type": "http.disconnect"}


def request_context(receive: Any, *, stall_seconds: float = 0.01) -> RequestContext:
    async def send(_message: Any) -> None:
        """Drop the message."""

    scope = {"type": "http", "headers": [(b"content-length", b"1")], "state": {}}
    return RequestContext(scope, receive, send, headers={}, stall_seconds=stall_seconds, drain_bytes=1)


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


class _SteppedTimeouts:
    """Replaces time: each part of a body takes as long as the test says, and timeouts are remembered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, part: bytes, seconds: float) -> None:
        self.now, self.timeouts, self._part, self._seconds = 0.0, list[float](), part, seconds
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(loop, "time", lambda: self.now, raising=True)
        monkeypatch.setattr("batchline.api.request_context.asyncio.timeout", self._timeout)

    def _timeout(self, delay: float) -> Any:
        self.timeouts.append(delay)
        return nullcontext()

    async def receive(self) -> Any:
        self.now += self._seconds
        if self._seconds > self.timeouts[-1]:
            raise TimeoutError
        return {"type": "http.request", "body": self._part, "more_body": True}


@pytest.mark.rule("A14", "A body that trickles is given up like one that stalls.")
@pytest.mark.parametrize(
    ("size", "seconds", "parts"), [(1, 29, 1), (1024, 20, 1), (16 * 1024, 20, 100), (10 * 1024, 14, 100), (10, 0, 100)]
)
async def test_a_body_must_make_progress(
    size: int, seconds: float, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A14: a byte now and then is too little, and what comes over a slow line is enough."""
    steps = _SteppedTimeouts(monkeypatch, part=b"x" * size, seconds=seconds)
    context = request_context(steps.receive, stall_seconds=30)
    read = 0
    with suppress(RequestTimeout):
        while read < 100:
            await context.receive()
            read += 1
    assert read == parts


@pytest.mark.parametrize("state", [{}, {"project_id": "p"}])
async def test_only_the_body_of_a_request_without_a_key_is_one_to_give_up(state: dict[str, Any]) -> None:
    """A14: a handler that reads a form before it knows who sent it has no claim to its connection."""
    waits = []

    async def receive() -> Any:
        waits.append(client_state.waits_for_body)
        return END

    async def send(_message: Any) -> None:
        """Drop the message."""

    scope = {"type": "http", "headers": [(b"content-length", b"1")], "state": state}
    client_state = client_state_of(scope)
    await RequestContext(scope, receive, send, headers={}, stall_seconds=1, drain_bytes=1).receive()
    assert waits == [not is_authenticated(state)]
    assert not client_state.waits_for_body


@pytest.mark.parametrize(("state", "seconds"), [({}, 5), ({"project_id": "p"}, 3600)])
async def test_the_rest_of_a_refused_body_is_read_for_a_shorter_time_without_a_key(
    state: dict[str, Any], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A14"""
    timeouts = []

    def timeout(delay: float) -> asyncio.Timeout:
        timeouts.append(delay)
        return asyncio.Timeout(asyncio.get_running_loop().time())

    async def receive() -> Any:
        drains.append(client_state.only_drains)
        await asyncio.Event().wait()

    async def send(_message: Any) -> None:
        """Drop the message."""

    drains: list[bool] = []
    monkeypatch.setattr("batchline.api.request_context.asyncio.timeout", timeout)
    scope = {"type": "http", "headers": [(b"content-length", b"1")], "state": state}
    client_state = client_state_of(scope)
    context = RequestContext(scope, receive, send, headers={}, stall_seconds=3600, drain_bytes=1)
    await context.send({"type": "http.response.body", "body": b""})
    assert (timeouts, drains, client_state.only_drains) == ([seconds], [True], False)
