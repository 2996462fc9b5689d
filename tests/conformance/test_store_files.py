"""Files in every store: rules B4 to B8."""

from collections.abc import Awaitable, Callable

import pytest

from batchline.domain.errors import LeaseLost
from batchline.domain.records import File, Owner
from tests.support.stores import DAY, LEASE, ME, NOW, OTHER, World

pytestmark = pytest.mark.anyio

GiveUp = Callable[[World, File], Awaitable[None]]


async def page(
    world: World, owner: Owner, *, after: str | None = None, limit: int = 100, ascending: bool = True, **other: str
) -> list[str]:
    found = await world.store.files(
        owner.project_id, purpose=other.get("purpose"), ascending=ascending, after=after, limit=limit, at=NOW
    )
    assert found is not None
    return [file.id for file in found]


async def is_cursor(world: World, owner: Owner, file_id: str) -> bool:
    found = await world.store.files(
        owner.project_id, purpose=None, ascending=True, after=file_id, limit=1, at=NOW + 60 * DAY
    )
    return found is not None


async def test_an_upload_is_visible_only_when_it_is_finished(world: World) -> None:
    """B1, B2: an unfinished upload is invisible; a finished one has the size that the server measured."""
    owner = await world.owner()
    begun = world.file(owner, bytes=0)
    await world.store.begin_upload(begun, owner=ME, lease=LEASE)
    assert await world.store.file(owner.project_id, begun.id, at=NOW) is None
    assert await page(world, owner) == []
    assert not await is_cursor(world, owner, begun.id)
    assert await world.store.delete_file(owner.project_id, begun.id, at=NOW) is None
    whole = world.file(owner, id=begun.id, object_key=begun.object_key, filename="é/../\u2028", bytes=7)
    await world.store.finish_upload(whole, owner=ME)
    assert await world.store.file(owner.project_id, begun.id, at=NOW) == whole
    assert await page(world, owner) == [begun.id]


async def test_files_stand_in_the_order_in_which_they_became_visible(world: World) -> None:
    """B5: the order is total and stable, even if all files were made in one second and begun in another order."""
    owner = await world.owner()
    begun = [world.file(owner) for _ in range(5)]
    for file in begun:
        await world.store.begin_upload(file, owner=ME, lease=LEASE)
    finished = [begun[n] for n in (3, 0, 4, 1, 2)]
    for file in finished:
        await world.store.finish_upload(file, owner=ME)
    expected = [file.id for file in finished]
    assert await page(world, owner) == expected
    assert await page(world, owner, ascending=False) == expected[::-1]


@pytest.mark.parametrize("ascending", [True, False])
async def test_pages_neither_repeat_nor_miss_a_file(world: World, ascending: bool) -> None:
    """B5, C9b: pages neither repeat nor skip a file while files are added and removed between them."""
    owner = await world.owner()
    first = [(await world.stored(owner)).id for _ in range(7)]
    seen: list[str] = []
    while found := await page(world, owner, after=seen[-1] if seen else None, limit=2, ascending=ascending):
        seen += found
        if len(seen) < 8:
            await world.stored(owner)
        await world.store.delete_file(owner.project_id, seen[-1], at=NOW)
    assert len(seen) == len(set(seen))
    assert [file_id for file_id in seen if file_id in first] == (first if ascending else first[::-1])
    assert (len(seen) > 7) is ascending


async def test_a_file_that_is_gone_still_is_a_cursor(world: World) -> None:
    """B5: a deleted or expired file of this project is a valid cursor; an unknown or another project's file is not."""
    owner, stranger = await world.owner("alpha"), await world.owner("beta")
    first = await world.stored(owner)
    deleted = await world.stored(owner)
    expired = await world.stored(owner, expires_at=NOW + 10)
    last = await world.stored(owner)
    await world.store.delete_file(owner.project_id, deleted.id, at=NOW)
    assert await page(world, owner, after=deleted.id) == [expired.id, last.id]
    assert await page(world, owner, after=deleted.id, ascending=False) == [first.id]
    await world.expire_files(owner=ME, at=NOW + 10, limit=10)
    assert await page(world, owner, after=expired.id) == [last.id]
    assert not await is_cursor(world, owner, "file-unknown")
    assert not await is_cursor(world, stranger, first.id)
    assert await is_cursor(world, owner, first.id)


async def test_purposes_are_told_apart(world: World) -> None:
    """B5: the filter applies to every page."""
    owner = await world.owner()
    files = [await world.stored(owner, purpose=("batch", "batch_output")[n % 2]) for n in range(6)]
    inputs, outputs = [file.id for file in files[::2]], [file.id for file in files[1::2]]
    assert await page(world, owner, purpose="batch") == inputs
    assert await page(world, owner, purpose="batch_output") == outputs
    assert await page(world, owner, purpose="batch", after=outputs[0]) == inputs[1:]
    assert await page(world, owner, purpose="neither") == []


async def test_a_project_sees_nothing_of_another(world: World) -> None:
    """A8: another project's file looks like one that does not exist."""
    owner, stranger = await world.owner("alpha"), await world.owner("beta")
    file = await world.stored(owner)
    assert await world.store.file(stranger.project_id, file.id, at=NOW) is None
    assert await page(world, stranger) == []
    assert await world.store.delete_file(stranger.project_id, file.id, at=NOW) is None
    assert await world.store.file(owner.project_id, file.id, at=NOW) == file


@pytest.mark.rule("B4", "Expired files are not found, to the second.")
async def test_an_expired_file_is_gone_on_the_second(world: World) -> None:
    """B4: a file is expired from its time on, even before ``expire_files`` marked it."""
    owner = await world.owner()
    file = await world.stored(owner, expires_at=NOW + 10)
    assert await world.store.file(owner.project_id, file.id, at=NOW + 9) == file
    assert await world.store.file(owner.project_id, file.id, at=NOW + 10) is None
    listed = await world.store.files(owner.project_id, purpose=None, ascending=True, after=None, limit=9, at=NOW + 10)
    assert listed == []
    assert await world.store.delete_file(owner.project_id, file.id, at=NOW + 10) is None


@pytest.mark.rule("B4", "The service removes the objects of expired files.")
async def test_expired_files_give_up_their_objects_once(world: World) -> None:
    """B4: each expired file is returned exactly once, at most ``limit`` at a time."""
    owner = await world.owner()
    late = {(await world.stored(owner, expires_at=NOW + n)).object_key for n in range(1, 6)}
    await world.stored(owner, expires_at=NOW + 6)
    assert await world.expire_files(owner=ME, at=NOW, limit=10) == []
    swept = [await world.expire_files(owner=ME, at=NOW + 5, limit=2) for _ in range(4)]
    assert [len(keys) for keys in swept] == [2, 2, 1, 0]
    assert {key for keys in swept for key in keys} == late


@pytest.mark.rule("B8", "A second delete is 404.")
async def test_a_deleted_file_is_gone_and_deleted_once(world: World) -> None:
    """B8: the delete returns the object's key; ``expire_files`` does not return it again."""
    owner = await world.owner()
    file = await world.stored(owner, expires_at=NOW + 5)
    assert await world.store.delete_file(owner.project_id, file.id, at=NOW) == file
    assert await world.store.delete_file(owner.project_id, file.id, at=NOW) is None
    assert await world.store.file(owner.project_id, file.id, at=NOW) is None
    assert await page(world, owner) == []
    assert await world.expire_files(owner=ME, at=NOW + 5, limit=10) == []


async def _abandon(world: World, file: File) -> None:
    await world.store.abandon_upload(file.id, owner=ME)


async def _start_anew(world: World, file: File) -> None:
    await world.die(ME)
    assert await world.expire_files(owner=OTHER, at=NOW, limit=10) == [file.object_key]


async def _let_lapse(world: World, file: File) -> None:
    await world.pass_time(LEASE + 1)
    assert await world.expire_files(owner=ME, at=NOW, limit=10) == [file.object_key]


@pytest.mark.parametrize("give_up", [_abandon, _start_anew, _let_lapse])
async def test_an_upload_that_was_given_up_cannot_be_finished(world: World, give_up: GiveUp) -> None:
    """B2: a late writer cannot finish, so its object may be deleted whatever its age."""
    owner = await world.owner()
    file = world.file(owner)
    await world.store.begin_upload(file, owner=ME, lease=LEASE)
    await give_up(world, file)
    with pytest.raises(LeaseLost):
        await world.store.renew_upload(file.id, owner=ME, lease=LEASE)
    with pytest.raises(LeaseLost):
        await world.store.finish_upload(file, owner=ME)
    assert await world.store.file(owner.project_id, file.id, at=NOW) is None
    assert not await world.store.referenced_keys([file.object_key])


async def test_only_its_owner_moves_an_upload(world: World) -> None:
    owner = await world.owner()
    file = world.file(owner)
    await world.store.begin_upload(file, owner=ME, lease=LEASE)
    with pytest.raises(LeaseLost):
        await world.store.renew_upload(file.id, owner=OTHER, lease=LEASE)
    with pytest.raises(LeaseLost):
        await world.store.finish_upload(file, owner=OTHER)
    await world.store.abandon_upload(file.id, owner=OTHER)
    await world.store.finish_upload(file, owner=ME)
    assert await page(world, owner) == [file.id]


async def test_a_finished_upload_stays_as_it_is(world: World) -> None:
    """A second finish, a late renewal and a late abandonment change nothing."""
    owner = await world.owner()
    file = await world.stored(owner)
    with pytest.raises(LeaseLost):
        await world.store.finish_upload(world.file(owner, id=file.id, bytes=999), owner=ME)
    with pytest.raises(LeaseLost):
        await world.store.renew_upload(file.id, owner=ME, lease=LEASE)
    await world.store.abandon_upload(file.id, owner=ME)
    await world.pass_time(LEASE + 1)
    assert await world.expire_files(owner=OTHER, at=NOW, limit=10) == []
    assert await world.store.file(owner.project_id, file.id, at=NOW) == file


async def test_a_renewed_upload_lives_on(world: World) -> None:
    owner = await world.owner()
    file = world.file(owner)
    await world.store.begin_upload(file, owner=ME, lease=LEASE)
    await world.pass_time(LEASE - 1)
    await world.store.renew_upload(file.id, owner=ME, lease=LEASE)
    await world.pass_time(LEASE - 1)
    assert await world.expire_files(owner=ME, at=NOW, limit=10) == []
    await world.store.finish_upload(file, owner=ME)


async def test_an_object_is_kept_while_a_row_stands_for_it(world: World) -> None:
    """B8: the pruner must not delete the object of an upload under way."""
    owner = await world.owner()
    begun = world.file(owner)
    await world.store.begin_upload(begun, owner=ME, lease=LEASE)
    kept = await world.stored(owner)
    deleted = await world.stored(owner)
    await world.store.delete_file(owner.project_id, deleted.id, at=NOW)
    expired = await world.stored(owner, expires_at=NOW)
    await world.expire_files(owner=ME, at=NOW, limit=10)
    asked = [begun.object_key, kept.object_key, deleted.object_key, expired.object_key, "uploads/unknown"]
    assert await world.store.referenced_keys(asked) == {begun.object_key, kept.object_key}
    assert await world.store.known_keys(asked) == set(asked) - {"uploads/unknown"}
    assert await world.store.referenced_keys([]) == set()


async def test_the_stored_bytes_of_a_project_are_those_of_its_visible_files(world: World) -> None:
    """B2: neither uploads under way nor deleted files nor files of other projects count."""
    owner, other = await world.owner(), await world.owner("other")
    assert await world.store.stored_bytes(owner.project_id) == 0
    kept, deleted, begun = (world.file(owner, bytes=size) for size in (5, 70, 900))
    for file in (kept, deleted, begun):
        await world.store.begin_upload(file, owner=ME, lease=LEASE)
    for file in (kept, deleted):
        await world.store.finish_upload(file, owner=ME)
    await world.store.delete_file(owner.project_id, deleted.id, at=NOW)
    assert await world.store.stored_bytes(owner.project_id) == 5
    assert await world.store.stored_bytes(other.project_id) == 0


async def test_the_stored_bytes_of_an_organization_are_those_of_all_its_projects(world: World) -> None:
    """B2"""
    first, second, other = [await world.owner(*names) for names in (("a", "x"), ("b", "x"), ("a", "y"))]
    for owner, size in ((first, 5), (second, 70), (other, 900)):
        file = world.file(owner, bytes=size)
        await world.store.begin_upload(file, owner=ME, lease=LEASE)
        await world.store.finish_upload(file, owner=ME)
    assert first.organization_id == second.organization_id
    assert await world.store.stored_bytes_of_organization(first.organization_id) == 75
    assert await world.store.stored_bytes_of_organization(other.organization_id) == 900
    assert await world.store.stored_bytes_of_organization("unknown") == 0
