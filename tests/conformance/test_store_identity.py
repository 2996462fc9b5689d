"""The identity of a database and of its objects, in every store."""

import asyncio

import pytest

from batchline.domain.identity import Identity
from tests.support.stores import NOW, World

pytestmark = pytest.mark.anyio


async def test_a_new_database_has_no_id_and_keeps_the_first(world: World) -> None:
    """A copy of a database that was never used must not have the same id."""
    assert await world.store.identity() == Identity(database_id=None, objects_id=None)
    named = await asyncio.gather(*(world.store.name_database(f"database-{n}") for n in range(5)))
    assert len({identity.database_id for identity in named}) == 1
    assert await world.store.identity() == named[0]


async def test_the_first_objects_stay(world: World) -> None:
    """Processes that start at once all get the id that one of them wrote."""
    bound = await asyncio.gather(*(world.store.bind_objects(f"objects-{n}") for n in range(5)))
    assert len({identity.marker for identity in bound}) == 1
    assert await world.store.identity() == bound[0]


async def test_both_ids_can_be_replaced(world: World) -> None:
    await world.store.bind_objects("old")
    await world.store.renew_identity(database_id="new", objects_id="newer")
    assert (await world.store.identity()).marker == "new-newer"


async def test_objects_are_needed_by_files_and_by_batches_that_run(world: World) -> None:
    assert not await world.store.needs_objects()
    owner = await world.owner()
    assert not await world.store.needs_objects()
    file = await world.stored(owner)
    assert await world.store.needs_objects()
    await world.store.delete_file(owner.project_id, file.id, at=NOW)
    assert not await world.store.needs_objects()
    await world.running(owner)
    assert await world.store.needs_objects()
    await world.record_all(await world.claim())
    finish = await world.finish()
    assert await world.store.needs_objects()
    await world.publish(finish)
    assert not await world.store.needs_objects()
