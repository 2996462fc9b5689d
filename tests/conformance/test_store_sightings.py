"""What the sweeps have seen of objects without a row, in every store."""

import pytest

from tests.support.stores import NOW, World

pytestmark = pytest.mark.anyio

_HOUR = 3600


async def test_an_object_is_due_after_an_hour(world: World) -> None:
    """The first sighting counts, however often the object is seen in between."""

    async def sight(*keys: str, at: int, age: int = _HOUR) -> tuple[int, list[str]]:
        sighted = await world.store.sight(keys, at=at, age=age, limit=10)
        return sighted.first, sighted.due

    assert await sight("uploads/a", "uploads/b", at=NOW) == (2, [])
    assert await sight("uploads/b", "uploads/c", at=NOW) == (1, [])
    await _age(world, _HOUR - 60)
    assert await sight("uploads/b", at=NOW + _HOUR - 60) == (0, [])
    await _age(world, 60)
    assert await sight("uploads/b", "uploads/d", at=NOW + _HOUR) == (1, ["uploads/b"])
    await world.store.forget(["uploads/b"])
    assert await sight("uploads/b", at=NOW + _HOUR) == (1, [])


async def test_only_so_many_objects_are_remembered(world: World) -> None:
    """A known one is still counted when there is no more room."""
    await world.store.sight(["uploads/a"], at=NOW, age=0, limit=2)
    sighted = await world.store.sight(["uploads/a", "uploads/b", "uploads/c"], at=NOW, age=0, limit=2)
    assert (sighted.first, sighted.due, sighted.ignored) == (1, ["uploads/a"], 1)
    assert (await world.store.sight([], at=NOW, age=0, limit=2)).due == []


async def test_an_object_that_is_not_seen_any_more_is_forgotten(world: World) -> None:
    await world.store.sight(["uploads/a", "uploads/b"], at=NOW, age=0, limit=9)
    await _age(world, 2 * _HOUR)
    await world.store.sight(["uploads/b"], at=NOW + 2 * _HOUR, age=0, limit=9)
    await world.store.forget_unseen(at=NOW + 2 * _HOUR, age=_HOUR)
    sighted = await world.store.sight(["uploads/a", "uploads/b"], at=NOW + 2 * _HOUR, age=0, limit=9)
    assert (sighted.first, sighted.due) == (1, ["uploads/b"])


async def _age(world: World, seconds: int) -> None:
    """Let time pass for a store that compares sightings by its own clock."""
    if execute := getattr(world, "execute", None):
        for column in ("first_at", "last_at"):
            await execute(f"UPDATE sightings SET {column} = {column} - make_interval(secs => {seconds})")
