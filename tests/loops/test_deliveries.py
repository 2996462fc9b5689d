"""The delivery of events in a running engine (G10): at least once, with the same id, on a schedule."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from batchline.domain.records import Batch, Owner
from batchline.domain.states import BatchStatus
from batchline.domain.webhooks import EVENTS, RETRY_SECONDS, DeliveryState, Message, SendResult, Webhook
from batchline.loops.deliveries import Deliveries
from batchline.ports import NewBatch, NewKey
from batchline.store.sqlite.database import SqliteDatabase
from batchline.store.store import SqlStore
from batchline.system import ThreadPool
from batchline.telemetry.metrics import Metrics
from tests.support.clocks import SettableClock
from tests.support.engine_harness import Bench
from tests.support.webhook_receivers import MemorySender

NOW = 1_800_000_000
KEY = NewKey(
    key_id="key_1",
    digest=b"",
    hint="",
    project="p",
    project_id="1",
    organization="o",
    organization_id="2",
    at=NOW,
)


def webhook_of(name: str, project_id: str) -> Webhook:
    return Webhook(
        id=name,
        project_id=project_id,
        url=f"https://{name}.example.org/",
        events=",".join(EVENTS),
        secret="whsec_AAAA",
        by_operator=False,
        created_at=0,
    )


async def hook(bench: Bench, name: str = "wh_1", *, project: str = "alpha") -> None:
    await bench.rows.create_webhook(webhook_of(name, (await bench.owner(project)).project_id))


async def until_sent(bench: Bench, batch: Batch, number: int) -> None:
    await bench.until(batch, lambda _: len(bench.sender.messages) >= number)


def test_the_end_of_a_batch_is_delivered_at_once(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:

        async def scene() -> None:
            await hook(bench)
            await hook(bench, "wh_other", project="beta")
            batch = await bench.ended(await bench.batch(["good"]))
            await until_sent(bench, batch, 1)
            (event,) = bench.sender.events
            assert event == {
                "id": f"evt_{batch.id.removeprefix('batch_')}",
                "object": "event",
                "created_at": batch.completed_at,
                "type": "batch.completed",
                "data": {"id": batch.id},
            }
            (message,) = bench.sender.messages
            assert (message.url, message.by_operator) == ("https://wh_1.example.org/", False)
            assert 'webhook_deliveries_total{result="delivered"} 1' in bench.metrics.render().decode()

        bench.play(scene())


@pytest.mark.rule("G10", "A delivery is tried again on the schedule, with the same id, and given up after the last.")
@pytest.mark.anyio
async def test_a_receiver_that_fails_is_tried_on_the_schedule(tmp_path: Path) -> None:
    clock, sender = SettableClock(now=NOW), MemorySender()
    sender.answer = lambda _: SendResult(status=500)
    async with on_sqlite(tmp_path, clock) as store:
        owner = await store.create_key(KEY)
        await store.create_webhook(webhook_of("wh_1", owner.project_id))
        await fail_batch(store, owner)
        for wait in (*RETRY_SECONDS, None):
            await attempt(store, sender, clock)
            (delivery,) = await store.deliveries("wh_1", limit=10)
            if wait is not None:
                assert (delivery.state, delivery.next_at) == (DeliveryState.PENDING, int(clock.now()) + wait)
                clock.set(clock.now() + wait)
        assert (delivery.state, delivery.attempts, delivery.status) == (DeliveryState.FAILED, 8, 500)
    assert len(sender.messages) == 8
    assert len({message.headers["webhook-id"] for message in sender.messages}) == 1
    assert len({message.headers["webhook-timestamp"] for message in sender.messages}) == 8


async def attempt(store: SqlStore, sender: MemorySender, clock: SettableClock) -> None:
    """Make the deliveries that are due, and wait for their end."""
    deliveries = Deliveries(store=store, sender=sender, clock=clock, metrics=Metrics(), every=1)
    async with deliveries._group:
        await deliveries.step()


async def fail_batch(store: SqlStore, owner: Owner, batch_id: str = "batch_1") -> None:
    batch = Batch(
        id=batch_id,
        project_id=owner.project_id,
        key_id=owner.key_id,
        endpoint="/v1/chat/completions",
        input_file_id="file-1",
        metadata=b"{}",
        status=BatchStatus.VALIDATING,
        created_at=NOW,
        expires_at=NOW + 1,
        epoch=1,
    )
    await store.begin_batch(NewBatch(batch=batch, digest=b""), owner="me", lease=30, since=0)
    await store.fail_batch(batch.id, epoch=1, errors=b"{}", answer=b"{}", at=NOW)


@asynccontextmanager
async def on_sqlite(folder: Path, clock: SettableClock) -> AsyncIterator[SqlStore]:
    threads = ThreadPool(1, name="database")
    database = SqliteDatabase(folder / "store.sqlite", clock=clock, writer=threads, reader=threads)
    try:
        yield SqlStore(database)
    finally:
        threads.close()
        database.close()


def test_a_receiver_that_was_down_for_ten_minutes_gets_every_event(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:
        down_until = bench.time.now + 600

        def answer(_: Message) -> SendResult:
            return SendResult(detail="refused") if bench.time.now < down_until else SendResult(status=200)

        async def scene() -> None:
            bench.sender.answer = answer
            await hook(bench)
            batches = [await bench.ended(await bench.batch([f"good {n}"])) for n in range(20)]

            async def delivered() -> set[str]:
                found = await bench.rows.deliveries("wh_1", limit=100)
                return {one.batch_id for one in found if one.state is DeliveryState.DELIVERED}

            while len(await delivered()) < len(batches):
                bench.skip(9)
                await bench.engine.api_role.services.clock.sleep(1)
            assert await delivered() == {batch.id for batch in batches}

        bench.play(scene(), seconds=4000)


def test_a_slow_receiver_does_not_hold_up_another(tmp_path: Path) -> None:
    with closing(Bench(tmp_path)) as bench:
        real = bench.sender.send

        async def send(message: Message) -> SendResult:
            if "wh_1" in message.url:
                await bench.engine.api_role.services.clock.sleep(15)
                return SendResult(detail="slow")
            return await real(message)

        bench.sender.send = send  # type: ignore[method-assign]

        async def scene() -> None:
            await hook(bench)
            await hook(bench, "wh_2", project="beta")
            for n in range(20):
                await bench.ended(await bench.batch([f"good {n}"]))
            before = bench.time.now
            batch = await bench.ended(await bench.batch(["other"], project="beta"))
            await until_sent(bench, batch, 1)
            assert bench.time.now - before < 5

        bench.play(scene())


@pytest.mark.anyio
async def test_many_slow_receivers_of_a_project_do_not_hold_up_another_project(tmp_path: Path) -> None:
    clock, sender, answered = SettableClock(now=NOW), MemorySender(), asyncio.Event()
    real = sender.send

    async def send(message: Message) -> SendResult:
        result = await real(message)
        await answered.wait()
        return result

    sender.send = send  # type: ignore[method-assign]
    async with on_sqlite(tmp_path, clock) as store:
        busy = await store.create_key(KEY)
        other = await store.create_key(replace(KEY, key_id="key_2", digest=b"2", project="q", project_id="3"))
        for n in range(20):
            await store.create_webhook(webhook_of(f"wh_{n}", busy.project_id))
        await store.create_webhook(webhook_of("wh_other", other.project_id))
        deliveries = Deliveries(store=store, sender=sender, clock=clock, metrics=Metrics(), every=1)
        async with deliveries._group:
            await fail_batch(store, busy)
            await deliveries.step()
            await fail_batch(store, other, "batch_2")
            await deliveries.step()
            await asyncio.sleep(0)
            urls = [message.url for message in sender.messages]
            answered.set()
        assert "https://wh_other.example.org/" in urls


@pytest.mark.rule("G10", "An event is delivered although its process died before, during or after the attempt.")
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_an_event_survives_the_death_of_its_process(tmp_path: Path, moment: str) -> None:
    with closing(Bench(tmp_path)) as bench:
        sent: list[str] = []
        real = bench.sender.send

        async def send(message: Message) -> SendResult:
            if moment == "before":
                await bench.engine.api_role.services.clock.sleep(1000)
            sent.append(message.headers["webhook-id"])
            if moment == "during":
                await bench.engine.api_role.services.clock.sleep(1000)
            return await real(message)

        bench.sender.send = send  # type: ignore[method-assign]

        async def first() -> Batch:
            await hook(bench)
            batch = await bench.ended(await bench.batch(["good"]))
            while moment != "before" and not sent:
                await bench.engine.api_role.services.clock.sleep(0.001)
            return batch

        batch = bench.play(first())
        bench.kill()
        bench.sender.send = real  # type: ignore[method-assign]
        bench.start()

        async def second() -> None:
            while True:
                (delivery,) = await bench.rows.deliveries("wh_1", limit=10)
                if delivery.state is DeliveryState.DELIVERED:
                    break
                await bench.engine.api_role.services.clock.sleep(1)
            ids = {message.headers["webhook-id"] for message in bench.sender.messages} | set(sent)
            assert ids == {f"evt_{batch.id.removeprefix('batch_')}"}

        bench.play(second())
