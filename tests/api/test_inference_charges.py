"""What cannot be seen from outside for certain: nothing runs ahead of the client, and no charge is skipped (E2, D4)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from batchline.domain.models import Catalog
from batchline.domain.money import Tariff
from batchline.domain.outcomes import Success
from batchline.domain.records import Charge, Owner
from batchline.domain.replies import Answer, Reply
from batchline.domain.request_rules import RequestRules
from batchline.pipeline.budget import Budgets
from batchline.pipeline.inference import Inference
from batchline.pipeline.routing import SyncRouter
from batchline.pipeline.token_limit import TokenLimit
from batchline.system import SystemClock
from batchline.telemetry.metrics import Metrics
from tests.support.manual_upstream import delta, event

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
OWNER = Owner(key_id="k", project_id="p", organization_id="o")
BODY = b'{"model":"m","messages":[{"role":"user","content":"abcd"}],"stream":true}'


class Endless:
    """An upstream whose streams never end."""

    request_id = None

    def __init__(self) -> None:
        self.taken = 0
        self.left = False

    async def post(self, path: str, body: bytes) -> Reply:
        return Answer(status=200, body=b"{}")

    async def get(self, path: str) -> Reply:
        return Answer(status=404, body=b"")

    @asynccontextmanager
    async def stream(self, path: str, body: bytes) -> AsyncIterator[Any]:
        try:
            yield self
        finally:
            self.left = True

    def __aiter__(self) -> "Endless":
        return self

    async def __anext__(self) -> bytes:
        self.taken += 1
        return event(delta("a"))


class SlowLedger:
    """Charges when it is let; notes what was charged to the end, and whether the upstream was left by then."""

    def __init__(self, upstream: Endless) -> None:
        self._upstream = upstream
        self.begun, self.let = asyncio.Event(), asyncio.Event()
        self.charged: list[Charge] = []
        self.upstream_left: bool | None = None

    async def charge(self, owner: Owner, charge: Charge, *, at: int) -> int:
        self.upstream_left = self._upstream.left
        self.begun.set()
        await self.let.wait()
        self.charged.append(charge)
        return 0


def inference(upstream: Endless, ledger: Any) -> Inference:
    return Inference(
        upstreams={"default": upstream},
        catalog=Catalog(),
        rules=RequestRules(),
        token_limit=TokenLimit(tokens={}),
        ledger=ledger,
        budgets=Budgets(metered=False),
        tariff=Tariff(metered=False, batch_percent=50),
        router=SyncRouter(clock=SystemClock()),
        clock=SystemClock(),
        metrics=Metrics(),
        read_on_seconds=60,
        read_on_bytes=len(event(delta("a"))) * 3,
    )


async def test_no_more_is_taken_of_the_upstream_than_the_client_takes() -> None:
    """E2: back-pressure goes through; nothing is gathered in between."""
    upstream = Endless()
    ledger = SlowLedger(upstream)
    ledger.let.set()
    calls = inference(upstream, ledger)
    async with calls.stream(calls.prepare(OWNER, CHAT, BODY)) as events:
        assert not isinstance(events, Success)
        for count in range(1, 4):
            await anext(events)
            assert upstream.taken == count
    assert [charge.usage.output_tokens for charge in ledger.charged] == [3]


@pytest.mark.rule("E2", "A charge is made once, however often the call is cut off.")
@pytest.mark.parametrize("cancels", [1, 2, 3])
async def test_a_charge_is_made_once_however_often_the_call_is_cut_off(cancels: int) -> None:
    """E2, D4: by its client and by the server's end at once; the upstream is left first."""
    upstream = Endless()
    ledger = SlowLedger(upstream)
    calls = inference(upstream, ledger)
    reached = asyncio.Event()

    async def call() -> None:
        async with calls.stream(calls.prepare(OWNER, CHAT, BODY)) as events:
            assert not isinstance(events, Success)
            await anext(events)
            reached.set()
            await asyncio.Event().wait()

    calling = asyncio.create_task(call())
    await reached.wait()
    calling.cancel()
    await ledger.begun.wait()
    for _ in range(cancels - 1):
        calling.cancel()
        await asyncio.sleep(0)
    assert not calling.done()
    ledger.let.set()
    with suppress(asyncio.CancelledError):
        await calling
    assert calling.cancelled()
    assert ledger.upstream_left is True
    assert [(charge.requests, charge.usage.output_tokens) for charge in ledger.charged] == [(1, 1)]


async def test_an_answer_that_came_is_charged_though_its_call_is_cut_off_meanwhile() -> None:
    """E1, D4"""
    upstream = Endless()
    ledger = SlowLedger(upstream)
    calls = inference(upstream, ledger)
    calling = asyncio.create_task(calls.answer(calls.prepare(OWNER, CHAT, BODY.replace(b"true", b"false"))))
    await ledger.begun.wait()
    calling.cancel()
    await asyncio.sleep(0)
    ledger.let.set()
    with suppress(asyncio.CancelledError):
        await calling
    assert calling.cancelled()
    assert len(ledger.charged) == 1
