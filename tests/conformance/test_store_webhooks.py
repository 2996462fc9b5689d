"""Webhooks and the deliveries of events in every store: rule G10."""

from collections.abc import Awaitable, Callable

import pytest

from batchline.domain.errors import LeaseLost
from batchline.domain.records import Owner
from batchline.domain.states import BatchStatus
from batchline.domain.webhooks import EVENTS, DeliveryState, SendResult, Webhook
from tests.support.stores import DAY, ME, NOW, OTHER, World

pytestmark = pytest.mark.anyio

OK, FAULT, GONE = SendResult(status=200), SendResult(detail="refused"), SendResult(status=410)


async def hook(world: World, owner: Owner, *, events: str = ",".join(EVENTS), name: str = "wh_1") -> Webhook:
    await world.set_time(NOW)
    await world.set_time(NOW)
    webhook = Webhook(
        id=name,
        project_id=owner.project_id,
        url="https://example.org/",
        events=events,
        secret="whsec_AAAA",
        by_operator=True,
        created_at=NOW,
    )
    await world.store.create_webhook(webhook)
    return webhook


async def complete(world: World, owner: Owner) -> str:
    batch = await world.running(owner)
    await world.record_all(await world.claim())
    await world.publish(await world.finish())
    return batch.id


async def cancel(world: World, owner: Owner) -> str:
    batch = await world.running(owner)
    await world.store.cancel_batch(batch.project_id, batch.id, at=NOW)
    await world.publish(await world.finish())
    return batch.id


async def expire(world: World, owner: Owner) -> str:
    batch = await world.running(owner, expires_at=NOW + 1)
    await world.expire(at=NOW + 2)
    await world.publish(await world.finish())
    return batch.id


async def fail(world: World, owner: Owner) -> str:
    batch = await world.validating(owner)
    await world.store.fail_batch(batch.id, epoch=1, errors=b"{}", answer=b"{}", at=NOW)
    return batch.id


async def cancel_validating(world: World, owner: Owner) -> str:
    batch = await world.validating(owner)
    await world.store.cancel_batch(batch.project_id, batch.id, at=NOW)
    return batch.id


async def interrupt(world: World, owner: Owner) -> str:
    batch = await world.validating(owner, holder=OTHER)
    await world.die(OTHER)
    await world.pass_time(60)
    assert len(await world.store.fail_interrupted(owner=ME, errors=b"{}", answer=b"{}", at=NOW)) == 1
    return batch.id


ENDS = [
    (complete, "batch.completed"),
    (cancel, "batch.cancelled"),
    (expire, "batch.expired"),
    (fail, "batch.failed"),
    (cancel_validating, "batch.cancelled"),
    (interrupt, "batch.failed"),
]


@pytest.mark.rule("G10", "The end of a batch writes its event, however it ends.")
@pytest.mark.parametrize(("end", "event"), ENDS)
async def test_the_end_of_a_batch_writes_its_event(
    world: World, end: Callable[[World, Owner], Awaitable[str]], event: str
) -> None:
    owner = await world.owner()
    webhook = await hook(world, owner)
    other = await hook(world, await world.owner("beta"), name="wh_other")
    picky = await hook(world, owner, events="batch.expired,batch.failed", name="wh_picky")
    batch_id = await end(world, owner)
    (delivery,) = await world.store.deliveries(webhook.id, limit=10)
    assert (delivery.event_id, delivery.type, delivery.batch_id) == (f"evt_{batch_id[6:]}", event, batch_id)
    assert (delivery.state, delivery.attempts) == (DeliveryState.PENDING, 0)
    batch = await world.store.batch(owner.project_id, batch_id)
    assert batch is not None
    assert delivery.created_at in (batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at)
    assert await world.store.deliveries(other.id, limit=10) == []
    assert bool(await world.store.deliveries(picky.id, limit=10)) is (event in picky.events)


@pytest.mark.rule("G10", "An event is written in the transaction that ends the batch, or not at all.")
async def test_a_publish_that_fails_writes_no_event(world: World) -> None:
    owner = await world.owner()
    webhook = await hook(world, owner)
    await world.running(owner)
    await world.record_all(await world.claim())
    late = await world.finish()
    await world.store.defer_finalize(late, seconds=0)
    await world.pass_time(60)
    current = await world.finish(holder=OTHER)
    with pytest.raises(LeaseLost):
        await world.publish(late)
    assert await world.store.deliveries(webhook.id, limit=10) == []
    assert await world.publish(current) is BatchStatus.COMPLETED
    assert len(await world.store.deliveries(webhook.id, limit=10)) == 1


async def claim(world: World) -> list[str]:
    claimed = await world.store.claim_deliveries(lease=60, in_flight={}, per_project=10, limit=10)
    return [delivery.event_id for _, delivery in claimed]


async def test_each_webhook_gets_one_event_at_a_time_in_order(world: World) -> None:
    owner = await world.owner()
    await hook(world, owner)
    await hook(world, owner, name="wh_2")
    first, second = await fail(world, owner), await fail(world, owner)
    called = {"wh_2": owner.project_id}
    claimed = await world.store.claim_deliveries(lease=60, in_flight=called, per_project=10, limit=10)
    assert [(webhook.id, delivery.batch_id) for webhook, delivery in claimed] == [("wh_1", first)]
    await world.store.end_attempt(claimed[0][1], OK, retry_in=5)
    claimed = await world.store.claim_deliveries(lease=60, in_flight={}, per_project=10, limit=10)
    found = sorted((webhook.id, delivery.batch_id) for webhook, delivery in claimed)
    assert found == [("wh_1", second), ("wh_2", first)]


@pytest.mark.rule("G10", "The webhooks of one project leave room for the events of others.")
async def test_a_project_with_fewer_events_on_their_way_comes_first(world: World) -> None:
    alpha, beta = await world.owner(), await world.owner("beta")
    for n in range(5):
        await hook(world, alpha, name=f"wh_{n}")
    await hook(world, beta, name="wh_beta")
    for owner in (alpha, beta):
        await fail(world, owner)

    async def claimed(in_flight: dict[str, str], *, limit: int) -> list[str]:
        found = await world.store.claim_deliveries(lease=60, in_flight=in_flight, per_project=3, limit=limit)
        return sorted(webhook.id for webhook, _ in found)

    called = {"wh_0": alpha.project_id}
    assert await claimed(called, limit=1) == ["wh_beta"]
    assert await claimed(called, limit=10) == ["wh_1", "wh_2"]
    assert await claimed(dict.fromkeys(["wh_0", "wh_1", "wh_2"], alpha.project_id), limit=10) == []


@pytest.mark.rule("G10", "An attempt of a process that died is made again, with the same id.")
async def test_an_attempt_without_a_result_is_made_again(world: World) -> None:
    owner = await world.owner()
    await hook(world, owner)
    batch_id = await fail(world, owner)
    (late,) = await world.store.claim_deliveries(lease=60, in_flight={}, per_project=10, limit=10)
    assert await claim(world) == []
    await world.set_time(NOW + 61)
    (again,) = await world.store.claim_deliveries(lease=60, in_flight={}, per_project=10, limit=10)
    assert again[1].event_id == late[1].event_id == f"evt_{batch_id[6:]}"
    await world.store.end_attempt(late[1], FAULT, retry_in=5)
    await world.store.end_attempt(again[1], OK, retry_in=5)
    (delivery,) = await world.store.deliveries("wh_1", limit=10)
    assert (delivery.state, delivery.attempts, delivery.status) == (DeliveryState.DELIVERED, 1, 200)


async def test_a_delivery_that_failed_is_due_after_its_wait_and_given_up_at_last(world: World) -> None:
    owner = await world.owner()
    await hook(world, owner)
    await fail(world, owner)
    at = NOW
    for retry_in in (5, 300):
        await world.set_time(at)
        ((_, delivery),) = await world.store.claim_deliveries(lease=60, in_flight={}, per_project=10, limit=10)
        await world.store.end_attempt(delivery, FAULT, retry_in=retry_in)
        await world.set_time(at + retry_in - 1)
        assert await claim(world) == []
        at += retry_in
    await world.set_time(at + 1)
    ((_, delivery),) = await world.store.claim_deliveries(lease=60, in_flight={}, per_project=10, limit=10)
    assert delivery.attempts == 2
    await world.store.end_attempt(delivery, FAULT, retry_in=None)
    (ended,) = await world.store.deliveries("wh_1", limit=10)
    assert (ended.state, ended.attempts, ended.detail) == (DeliveryState.FAILED, 3, "refused")
    await world.set_time(at + DAY)
    assert await claim(world) == []


@pytest.mark.rule("G10", "A receiver that answers 410 disables its webhook.")
async def test_a_receiver_that_is_gone_disables_its_webhook(world: World) -> None:
    owner = await world.owner()
    await hook(world, owner)
    await fail(world, owner)
    await fail(world, owner)
    ((_, delivery),) = await world.store.claim_deliveries(lease=60, in_flight={}, per_project=10, limit=10)
    await world.store.end_attempt(delivery, GONE, retry_in=5)
    webhook = await world.store.webhook("wh_1")
    assert webhook is not None
    assert webhook.disabled_at is not None
    states = [found.state for found in await world.store.deliveries("wh_1", limit=10)]
    assert states == [DeliveryState.FAILED, DeliveryState.FAILED]
    await fail(world, owner)
    assert len(await world.store.deliveries("wh_1", limit=10)) == 2
    assert await claim(world) == []


async def test_a_webhook_is_rotated_and_deleted(world: World) -> None:
    owner = await world.owner()
    webhook = await hook(world, owner)
    await fail(world, owner)
    assert await world.store.webhooks() == [webhook]
    assert await world.store.rotate_webhook("wh_1", secret="whsec_BBBB")
    ((rotated, _),) = await world.store.claim_deliveries(lease=0, in_flight={}, per_project=10, limit=10)
    assert rotated.secret == "whsec_BBBB"
    assert not await world.store.rotate_webhook("wh_none", secret="whsec_BBBB")
    assert await world.store.delete_webhook("wh_1")
    assert not await world.store.delete_webhook("wh_1")
    assert await world.store.webhook("wh_1") is None
    assert await world.store.deliveries("wh_1", limit=10) == []


async def test_old_deliveries_are_deleted_and_pending_ones_stay(world: World) -> None:
    owner = await world.owner()
    await hook(world, owner)
    await fail(world, owner)
    ((_, delivery),) = await world.store.claim_deliveries(lease=60, in_flight={}, per_project=10, limit=10)
    await world.store.end_attempt(delivery, OK, retry_in=5)
    await fail(world, owner)
    await world.set_time(NOW + 99)
    await world.store.delete_old_deliveries(age=100)
    assert len(await world.store.deliveries("wh_1", limit=10)) == 2
    await world.set_time(NOW + 200)
    await world.store.delete_old_deliveries(age=100)
    assert [found.state for found in await world.store.deliveries("wh_1", limit=10)] == [DeliveryState.PENDING]


@pytest.mark.rule("G10", "An ended delivery can be sent again.")
async def test_an_ended_delivery_is_sent_again_as_if_it_were_new(world: World) -> None:
    owner = await world.owner()
    webhook = await hook(world, owner)
    await complete(world, owner)
    [(_, first)] = await world.store.claim_deliveries(lease=60, in_flight={}, per_project=10, limit=1)
    assert not await world.store.resend_delivery(webhook.id, first.id), "it has not ended"
    await world.store.end_attempt(first, OK, retry_in=5)
    assert not await world.store.resend_delivery("wh_other", first.id)
    assert not await world.store.resend_delivery(webhook.id, first.id + 100)
    assert await world.store.resend_delivery(webhook.id, first.id)
    [(_, again)] = await world.store.claim_deliveries(lease=60, in_flight={}, per_project=10, limit=1)
    assert (again.id, again.event_id, again.attempts) == (first.id, first.event_id, 0)
    await world.store.end_attempt(first, GONE, retry_in=None)
    [shown] = await world.store.deliveries(webhook.id, limit=10)
    assert shown.state is DeliveryState.PENDING, "the result of the earlier attempt comes too late"


async def test_nothing_is_sent_again_to_a_webhook_that_is_disabled(world: World) -> None:
    owner = await world.owner()
    webhook = await hook(world, owner)
    await complete(world, owner)
    [(_, delivery)] = await world.store.claim_deliveries(lease=60, in_flight={}, per_project=10, limit=1)
    await world.store.end_attempt(delivery, GONE, retry_in=None)
    assert not await world.store.resend_delivery(webhook.id, delivery.id)
