"""What the sweeps have seen of objects without a row, in every store."""

import pytest

from tests.support.stores import DAY, NOW, World

pytestmark = pytest.mark.anyio

_HOUR = 3600


async def test_an_object_is_due_after_an_hour(world: World) -> None:
    """The first sighting counts, however often the object is seen in between."""
    assert await _sight(world, "uploads/a", "uploads/b", at=NOW) == (2, [])
    assert await _sight(world, "uploads/b", "uploads/c", at=NOW) == (1, [])
    assert await _sight(world, "uploads/b", at=NOW + _HOUR - 1) == (0, [])
    assert await _sight(world, "uploads/b", "uploads/d", at=NOW + _HOUR) == (1, ["uploads/b"])
    await world.store.forget(["uploads/b"])
    assert await _sight(world, "uploads/b", at=NOW + _HOUR) == (1, [])


async def test_a_sighting_by_a_clock_that_was_ahead_counts_from_the_next_one(world: World) -> None:
    """It would not be due for as long as the clock was ahead."""
    await _sight(world, "uploads/a", at=NOW + 30 * DAY)
    assert await _sight(world, "uploads/a", at=NOW) == (0, [])
    assert await _sight(world, "uploads/a", at=NOW + _HOUR) == (0, ["uploads/a"])


async def test_only_so_many_objects_are_remembered(world: World) -> None:
    """A known one is still counted when there is no more room."""
    await world.store.sight(["uploads/a"], age=0, limit=2)
    sighted = await world.store.sight(["uploads/a", "uploads/b", "uploads/c"], age=0, limit=2)
    assert (sighted.first, sighted.due, sighted.ignored) == (1, ["uploads/a"], 1)
    assert (await world.store.sight([], age=0, limit=2)).due == []


async def test_an_object_that_is_not_seen_any_more_is_forgotten(world: World) -> None:
    await _sight(world, "uploads/a", "uploads/b", at=NOW)
    await _sight(world, "uploads/b", at=NOW + 2 * _HOUR)
    await world.store.forget_unseen(age=_HOUR)
    assert await _sight(world, "uploads/a", "uploads/b", at=NOW + 2 * _HOUR) == (1, ["uploads/b"])


async def _sight(world: World, *keys: str, at: int) -> tuple[int, list[str]]:
    """Record that objects were seen at that time, and return how many are new and which were seen an hour ago."""
    await world.set_time(at)
    sighted = await world.store.sight(keys, age=_HOUR, limit=10)
    return sighted.first, sighted.due
