"""Which failures of synchronous calls let an upstream be avoided."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchline.domain.endpoints import CHAT
from batchline.domain.errors import StreamBroken
from batchline.pipeline.inference import EventRelay
from tests.support.asgi import Client
from tests.support.engine_harness import Bench

_BOTH = ("default", "second")


@pytest.mark.parametrize(
    ("directive", "next_upstream"),
    [
        ("status=500", "second"),
        ("status=503", "second"),
        ("status=429", "second"),
        ("status=401", "second"),
        ("status=402", "second"),
        ("status=400", "default"),
        ("status=404", "default"),
        ("status=413", "default"),
        ("delay=0", "default"),
    ],
)
def test_an_upstream_that_fails_quickly_does_not_attract_calls(
    tmp_path: Path, directive: str, next_upstream: str
) -> None:
    """E2: it has the fewest calls in progress. A request that is at fault itself says nothing about the upstream."""
    upstreams = {"second": {"url": "http://second/v1"}}
    models = {"m": {"upstream": list(_BOTH)}}
    with closing(Bench(tmp_path, upstreams=upstreams, models=models)) as bench:

        async def scene() -> None:
            body = {"model": "m", "messages": [{"role": "user", "content": f"[[{directive}]]"}]}
            await Client(bench).post(CHAT, body)
            assert bench.router.choose(_BOTH) == next_upstream

        bench.play(scene())


class _BrokenStream:
    request_id: str | None = None

    def __aiter__(self) -> "_BrokenStream":
        return self

    async def __anext__(self) -> bytes:
        raise StreamBroken("cut")


@pytest.mark.anyio
async def test_an_upstream_whose_stream_breaks_is_reported() -> None:
    """E2: the client gets an error event, and further calls avoid the upstream."""
    broken: list[str] = []
    untyped: Any = SimpleNamespace(path=CHAT, upstream="default")
    relay = EventRelay(
        _BrokenStream(),
        untyped,
        untyped,
        on_broken=lambda: broken.append("default"),
        read_on_seconds=1,
        read_on_bytes=1,
    )
    (event,) = [event async for event in relay]
    assert b"broke off" in event
    assert broken == ["default"]
