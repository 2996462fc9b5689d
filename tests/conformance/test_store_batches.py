"""Batches in every store, as their owners see them: rules A11, C3, C6 to C12."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from msgspec.json import decode, encode

from batchline.domain.errors import LeaseLost
from batchline.domain.records import Batch
from batchline.domain.states import BatchStatus
from batchline.domain.wire import BatchObject
from batchline.ports import CreateRecord
from tests.support.stores import DAY, LEASE, ME, NOW, OTHER, World, cut

pytestmark = pytest.mark.anyio

ERRORS = b'{"object":"list","data":[{"code":"c","message":"m\\u0000","line":1,"param":null}]}'
ANSWER = b'{"error":{"message":"m","line":1}}'


async def start(world: World, batch: Batch, *, epoch: int = 1) -> CreateRecord:
    return await world.store.start_batch(
        batch.id, epoch=epoch, shards=cut([2, 2]), total=4, work_key=f"work/{batch.id}/1", at=NOW + 1
    )


async def fail(world: World, batch: Batch, *, epoch: int = 1) -> CreateRecord:
    return await world.store.fail_batch(batch.id, epoch=epoch, errors=ERRORS, answer=ANSWER, at=NOW + 1)


async def test_a_batch_is_there_from_the_start_of_its_validation(world: World) -> None:
    """C6: a list that is read meanwhile shows the batch."""
    batch = await world.validating()
    assert await world.seen(batch) == batch
    assert await world.store.batches(batch.project_id, after=None, limit=9) == [batch]
    assert (await world.store.known_batches([batch.id]))[batch.id].active
    assert await world.claim() == []


@pytest.mark.rule("C7", "A batch that was answered with 200 is in progress, with its counts.")
async def test_a_started_batch_is_in_progress_and_answered_with_itself(world: World) -> None:
    """C7: the answer to the create is the batch in progress."""
    batch = await world.validating()
    created = await start(world, batch)
    seen = await world.seen(batch)
    assert (seen.status, seen.in_progress_at) == (BatchStatus.IN_PROGRESS, NOW + 1)
    assert (seen.total, seen.completed, seen.failed) == (4, 0, 0)
    assert (seen.output_file_id, seen.error_file_id, seen.finalizing_at) == (None, None, None)
    assert created.answer_status == 200
    assert created.answer_body == encode(BatchObject.from_record(seen))


async def test_metadata_is_kept_byte_for_byte(world: World) -> None:
    """C1: metadata is returned unchanged, even where a JSON column would normalize it."""
    metadata = '{"b":1.10,"a":123456789012345678901234567890,"b":"\\u0000é\u2028", "z" : {} }'.encode()
    batch = await world.running(metadata=metadata)
    assert batch.metadata == metadata


async def test_a_refused_batch_has_failed(world: World) -> None:
    """C3: a refused batch is kept with its errors, counts of zero and no shards."""
    batch = await world.validating()
    created = await fail(world, batch)
    seen = await world.seen(batch)
    assert (seen.status, seen.failed_at, seen.errors) == (BatchStatus.FAILED, NOW + 1, ERRORS)
    assert (seen.total, seen.completed, seen.failed) == (0, 0, 0)
    assert (created.answer_status, created.answer_body) == (400, ANSWER)
    assert not (await world.store.known_batches([batch.id]))[batch.id].active
    assert await world.store.lease_finalizable(owner=ME, lease=LEASE, at=NOW) is None


async def test_the_answer_to_a_create_is_kept_as_it_was_given(world: World) -> None:
    """A11: a repeated create gets the same answer byte for byte, even after the batch changed its state."""
    started = await world.validating(idempotency_key="one")
    given = await start(world, started)
    refused = await world.validating(idempotency_key="two")
    refusal = await fail(world, refused)
    await world.record_all(await world.claim())
    await world.publish(await world.finish())
    assert (await world.seen(started)).status is BatchStatus.COMPLETED
    assert await world.store.create_record(started.id) == given
    assert await world.store.create_record(refused.id) == refusal
    assert await world.store.find_create(started.project_id, "one", since=NOW - 1) == given
    assert await world.store.create_record("batch_unknown") is None


async def test_a_batch_starts_once(world: World) -> None:
    """A11, C7: a second start neither adds shards nor changes the stored answer."""
    batch = await world.validating()
    given = await start(world, batch)
    await world.record((await world.claim(lines=1))[0], [0])
    for again in (start, fail):
        with pytest.raises(LeaseLost):
            await again(world, batch)
    assert await world.store.create_record(batch.id) == given
    assert len(await world.claim()) == 1


@pytest.mark.parametrize("go_on", [start, fail])
async def test_only_the_holder_of_the_epoch_ends_validation(
    world: World, go_on: Callable[..., Awaitable[CreateRecord]]
) -> None:
    """C6: a process that lost its batch to another can neither start nor fail it."""
    batch = await world.validating()
    with pytest.raises(LeaseLost):
        await go_on(world, batch, epoch=2)
    assert await world.seen(batch) == batch
    assert await world.claim() == []


@pytest.mark.parametrize("go_on", [start, fail])
async def test_a_batch_that_failed_stays_failed(world: World, go_on: Callable[..., Awaitable[CreateRecord]]) -> None:
    """C11: a batch leaves ``validating`` only once."""
    batch = await world.validating()
    refusal = await fail(world, batch)
    with pytest.raises(LeaseLost):
        await go_on(world, batch)
    assert await world.store.create_record(batch.id) == refusal


@pytest.mark.rule("C6", "Cancelled while validating: cancelled at once, and the create is answered with it.")
@pytest.mark.parametrize("go_on", [start, fail])
async def test_cancelled_while_validating_is_the_end_and_the_answer(
    world: World, go_on: Callable[..., Awaitable[CreateRecord]]
) -> None:
    """C6: the batch is terminal at once, without counts, files or shards, and this object answers the create."""
    batch = await world.validating()
    found = await world.store.cancel_batch(batch.project_id, batch.id, at=NOW + 5)
    assert found is not None
    cancelled, has_ended = found
    assert has_ended
    assert await world.store.cancel_batch(batch.project_id, batch.id, at=NOW + 6) == (cancelled, False)
    assert (cancelled.status, cancelled.cancelling_at, cancelled.cancelled_at) == ("cancelled", NOW + 5, NOW + 5)
    with pytest.raises(LeaseLost):
        await world.store.renew_batch(batch.id, epoch=1, owner=ME, lease=LEASE)
    kept = await world.store.create_record(batch.id)
    assert kept is not None
    with pytest.raises(LeaseLost):
        await go_on(world, batch)
    assert await world.store.create_record(batch.id) == kept
    assert kept.answer_status == 200
    assert decode(kept.answer_body or b"")["status"] == "cancelled"
    assert await world.seen(batch) == cancelled
    assert (cancelled.total, cancelled.output_file_id, cancelled.error_file_id) == (0, None, None)
    assert await world.claim() == []
    assert await world.store.lease_finalizable(owner=ME, lease=LEASE, at=NOW) is None


async def test_a_validating_batch_can_be_dropped(world: World) -> None:
    """C3: a 404 for a missing object leaves no batch. A started batch, or one of another epoch, is not dropped."""
    batch = await world.validating(idempotency_key="one")
    await world.store.drop_batch(batch.id, epoch=2)
    assert await world.seen(batch) == batch
    await world.store.drop_batch(batch.id, epoch=1)
    assert await world.store.batch(batch.project_id, batch.id) is None
    assert await world.store.find_create(batch.project_id, "one", since=NOW - 1) is None
    running = await world.running()
    await world.store.drop_batch(running.id, epoch=1)
    assert await world.seen(running) == running


async def test_only_its_holder_renews_a_batch(world: World) -> None:
    batch = await world.validating()
    await world.store.renew_batch(batch.id, epoch=1, owner=ME, lease=LEASE)
    for epoch, owner, batch_id in ((2, ME, batch.id), (1, OTHER, batch.id), (1, ME, "batch_unknown")):
        with pytest.raises(LeaseLost):
            await world.store.renew_batch(batch_id, epoch=epoch, owner=owner, lease=LEASE)


@pytest.mark.rule("A11", "Creates with one key at the same moment make one batch.")
async def test_two_creates_with_one_idempotency_key_make_one_batch(world: World) -> None:
    """A11: this holds for creates at the same moment too."""
    owner = await world.owner()
    news = [world.new_batch(owner, idempotency_key="one") for _ in range(8)]
    answers = await asyncio.gather(
        *(world.store.begin_batch(new, owner=ME, lease=LEASE, since=NOW - DAY) for new in news)
    )
    listed = await world.store.batches(owner.project_id, after=None, limit=99)
    assert listed is not None
    (made,) = listed
    assert [new.batch.id for new, earlier in zip(news, answers, strict=True) if earlier is None] == [made.id]
    expected = CreateRecord(batch_id=made.id, digest=b"same thing", answer_status=None, answer_body=None)
    assert [earlier for earlier in answers if earlier is not None] == [expected] * 7


@pytest.mark.rule("A11", "A key is kept for 24 hours.")
async def test_an_idempotency_key_is_its_projects_own_and_forgotten_in_time(world: World) -> None:
    """A11: an idempotency key is kept for a day and can be used again afterwards."""
    alpha, beta = await world.owner("alpha"), await world.owner("beta")
    first = await world.validating(alpha, idempotency_key="one")
    await world.validating(beta, idempotency_key="one")
    assert await world.store.find_create(alpha.project_id, "one", since=NOW) is None
    found = await world.store.find_create(alpha.project_id, "one", since=NOW - 1)
    assert found is not None
    assert found.batch_id == first.id
    later = world.new_batch(alpha, idempotency_key="one", created_at=NOW + DAY)
    assert await world.store.begin_batch(later, owner=ME, lease=LEASE, since=NOW) is None
    found = await world.store.find_create(alpha.project_id, "one", since=NOW)
    assert found is not None
    assert found.batch_id == later.batch.id
    assert (await world.seen(first)).status is BatchStatus.VALIDATING


async def test_an_answer_never_sent_is_found_again(world: World) -> None:
    """A11: only the key's newest equal create counts, while its answer was not sent, and only for a time."""
    owner, other_key = await world.owner(), await world.owner()

    async def found(*, key_id: str = owner.key_id, digest: bytes = b"same thing", since: int = NOW) -> str | None:
        created = await world.store.find_unanswered_create(key_id=key_id, digest=digest, since=since)
        return created.batch_id if created else None

    assert await found() is None
    first = await world.running(owner)
    assert await found() == first.id
    assert await found(key_id=other_key.key_id) is None
    assert await found(digest=b"another") is None
    assert await found(since=NOW + 1) is None
    newest = await world.validating(owner)
    assert await found() == newest.id
    await world.store.mark_answered(newest.id)
    assert await found() is None, "an older one must not come back for the newest, which was answered"


async def _validating(world: World) -> Batch:
    return await world.validating()


async def _in_progress(world: World) -> Batch:
    return await world.running()


async def _finalizing(world: World) -> Batch:
    batch = await world.running()
    await world.record_all(await world.claim())
    await world.finish()
    return batch


async def _completed(world: World) -> Batch:
    batch = await world.running()
    await world.record_all(await world.claim())
    await world.publish(await world.finish())
    return batch


async def _failed(world: World) -> Batch:
    batch = await world.validating()
    await fail(world, batch)
    return batch


async def _expired(world: World) -> Batch:
    batch = await world.running()
    await world.expire(at=NOW + DAY)
    await world.publish(await world.finish())
    return batch


@pytest.mark.rule("C10", "Cancel: cancelling from every state that is not over, once.")
@pytest.mark.parametrize(
    ("reach", "before", "after"),
    [
        (_validating, "validating", "cancelled"),
        (_in_progress, "in_progress", "cancelling"),
        (_finalizing, "finalizing", "cancelling"),
        (_completed, "completed", "completed"),
        (_failed, "failed", "failed"),
        (_expired, "expired", "expired"),
    ],
)
async def test_cancel_in_every_state(
    world: World, reach: Callable[[World], Awaitable[Batch]], before: str, after: str
) -> None:
    """C10: an active batch is cancelled once; a terminal one does not change."""
    batch = await reach(world)
    was = await world.seen(batch)
    assert was.status == before
    found = await world.store.cancel_batch(batch.project_id, batch.id, at=NOW + 150)
    assert found is not None
    cancelled, has_ended = found
    assert (cancelled.status, has_ended) == (after, before == "validating")
    assert cancelled.cancelling_at == (None if after == before else NOW + 150)
    assert cancelled.finalizing_at == was.finalizing_at
    assert await world.store.cancel_batch(batch.project_id, batch.id, at=NOW + 60) == (cancelled, False)
    assert await world.seen(batch) == cancelled


@pytest.mark.rule("A8", "A batch of another project can be neither seen nor cancelled.")
async def test_only_its_project_cancels_a_batch(world: World) -> None:
    """A8: another project's batch looks like one that does not exist."""
    batch, stranger = await world.running(), await world.owner("beta")
    assert await world.store.cancel_batch(stranger.project_id, batch.id, at=NOW) is None
    assert await world.store.cancel_batch(batch.project_id, "batch_unknown", at=NOW) is None
    assert await world.store.batch(stranger.project_id, batch.id) is None
    assert await world.seen(batch) == batch


async def test_batches_are_listed_newest_first(world: World) -> None:
    """C9, C9b: pages neither repeat nor skip a batch while more are created, even within one second."""
    owner, stranger = await world.owner("alpha"), await world.owner("beta")
    made = [(await world.validating(owner)).id for _ in range(5)]
    other_batch = await world.validating(stranger)
    seen: list[str] = []
    while page := await world.store.batches(owner.project_id, after=seen[-1] if seen else None, limit=2):
        seen += [batch.id for batch in page]
        await world.validating(owner)
    assert seen == made[::-1]
    assert await world.store.batches(owner.project_id, after="batch_unknown", limit=2) is None
    assert await world.store.batches(owner.project_id, after=other_batch.id, limit=2) is None


@pytest.mark.rule("C9", "Filters by state and time narrow the list.")
async def test_lists_can_be_narrowed(world: World) -> None:
    """C9: batches are filtered by state and by time; both bounds are exclusive."""
    owner = await world.owner()
    batches = [await world.validating(owner, created_at=NOW + n) for n in range(4)]
    for batch in batches[1:3]:
        await start(world, batch)

    async def narrowed(
        *,
        after: str | None = None,
        status: str | None = None,
        created_after: int | None = None,
        created_before: int | None = None,
    ) -> list[int]:
        found = await world.store.batches(
            owner.project_id,
            after=after,
            limit=9,
            status=status,
            created_after=created_after,
            created_before=created_before,
        )
        assert found is not None
        return [batch.created_at - NOW for batch in found]

    assert await narrowed() == [3, 2, 1, 0]
    assert await narrowed(status="in_progress") == [2, 1]
    assert await narrowed(status="completed") == []
    assert await narrowed(created_after=NOW + 1) == [3, 2]
    assert await narrowed(created_before=NOW + 1) == [0]
    assert await narrowed(created_after=NOW, created_before=NOW + 3, status="in_progress") == [2, 1]
    assert await narrowed(status="in_progress", after=batches[2].id) == [1]


async def test_the_version_of_the_tables_is_that_of_the_program(world: World) -> None:
    """F5: ``/readyz`` compares the two."""
    versions = await world.store.schema_versions()
    assert versions.database == versions.program >= 1


async def test_batches_are_found_by_model_and_by_a_text_in_id_or_metadata(world: World) -> None:
    """A text is compared in lower case; metadata that is no UTF-8 is searched too."""
    owner, other = await world.owner("alpha"), await world.owner("beta")
    first = await world.running(owner, model="small", metadata=b'{"name":"Invoices of May"}')
    second = await world.running(owner, model="large", metadata='{"name":"Caf\u00e9"}'.encode())
    third = await world.running(owner, model="large", metadata=b'{"name":"\xff\x00"}')
    fourth = await world.running(owner, model="small", metadata='{"name":"\u00dcbersetzung"}'.encode())
    await world.running(other, model="small", metadata=b'{"name":"Invoices of May"}')

    async def found(**wanted: Any) -> list[str]:
        batches = await world.store.batches(owner.project_id, after=None, limit=9, **wanted)
        return [batch.id for batch in batches or []]

    assert await found(text="invoices of") == [first.id]
    assert await found(text="caf\u00e9") == await found(text="CAF\u00e9") == [second.id]
    assert await found(text="\u00dcbersetzung") == [fourth.id], "a name is found as it was written"
    assert await found(text=third.id) == [third.id]
    assert await found(text="%") == await found(text="nothing") == []
    assert await found(model="large") == [third.id, second.id]
    assert await found(model="large", text="name", status="in_progress") == [third.id, second.id]
    assert await found(model="large", status="failed") == []
    assert await found(status="held") == []


async def test_open_batches_of_all_projects_are_listed_oldest_first(world: World) -> None:
    one, two = await world.owner("one"), await world.owner("two")
    made = [await world.running(owner) for owner in (one, two, one)]
    await world.store.cancel_batch(made[0].project_id, made[0].id, at=NOW)
    ended = await world.validating(two)
    await world.store.cancel_batch(ended.project_id, ended.id, at=NOW)
    found = await world.store.open_batches(limit=10)
    assert [batch.id for batch in found] == [batch.id for batch in made]
    assert [batch.total for batch in found] == [batch.total for batch in made]
    assert [batch.id for batch in await world.store.open_batches(limit=2)] == [batch.id for batch in made[:2]]
