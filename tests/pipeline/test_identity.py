"""A database and objects that belong together, and those that do not."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from batchline.domain.errors import WrongIdentity
from batchline.objects.local import LocalObjects
from batchline.pipeline.identity import IdentityCheck
from batchline.store.sqlite.database import SqliteDatabase
from batchline.store.store import SqlStore
from batchline.system import SystemRandom, ThreadPool
from tests.support.clocks import SettableClock
from tests.support.identities import identity_of
from tests.support.stores import World

pytestmark = pytest.mark.anyio


class Places:
    """Databases and folders of objects, by name."""

    def __init__(self, folder: Path, stack: AsyncExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._stores: dict[str, SqlStore] = {}

    def store(self, name: str) -> SqlStore:
        if name not in self._stores:
            writer, reader = ThreadPool(1, name="writer"), ThreadPool(1, name="reader")
            path = self._folder / f"{name}.sqlite"
            database = SqliteDatabase(path, clock=SettableClock(), writer=writer, reader=reader)
            for close in (database.close, writer.close, reader.close):
                self._stack.callback(close)
            self._stores[name] = SqlStore(database)
        return self._stores[name]

    def objects(self, name: str) -> LocalObjects:
        threads = ThreadPool(2, name="disk")
        self._stack.callback(threads.close)
        return LocalObjects(self._folder / name, threads, SystemRandom())

    def check(self, store: str, objects: str) -> IdentityCheck:
        return identity_of(self.store(store), self.objects(objects))

    async def fill(self, store: str, objects: str) -> None:
        """Store a file: its row, and its object."""
        world: Any = World(self.store(store), pass_time=_nothing, lose_time=_nothing, die=_nothing, set_time=_nothing)
        file = await world.stored(await world.owner())
        await self.objects(objects).put(file.object_key, b"x")

    async def markers(self, objects: str) -> list[str]:
        return await self.objects(objects).names("identity")


@pytest.fixture
async def places(tmp_path: Path) -> AsyncIterator[Places]:
    async with _opened(tmp_path) as opened:
        yield opened


@asynccontextmanager
async def _opened(folder: Path) -> AsyncIterator[Places]:
    async with AsyncExitStack() as stack:
        yield Places(folder, stack)


async def _nothing(*_: object) -> None:
    pass


async def test_what_is_empty_gets_an_identity_at_the_first_start(places: Places) -> None:
    check = places.check("one", "mine")
    with pytest.raises(WrongIdentity):
        await check.check()
    await check.claim()
    await check.check()
    await places.check("one", "mine").claim()
    assert await places.markers("mine") == [(await places.store("one").identity()).marker]


async def test_processes_that_start_at_once_end_with_one_identity(places: Places) -> None:
    await asyncio.gather(*(places.check("one", "mine").claim() for _ in range(8)))
    assert await places.markers("mine") == [(await places.store("one").identity()).marker]


async def test_of_two_folders_that_one_database_claims_at_once_one_is_refused(places: Places) -> None:
    claims = [places.check("one", folder).claim() for folder in ("mine", "other")]
    refused = await asyncio.gather(*claims, return_exceptions=True)
    assert sorted(map(type, refused), key=str) == sorted([type(None), WrongIdentity], key=str)
    assert len(await places.markers("mine") + await places.markers("other")) == 1


async def test_two_databases_that_claim_one_folder_at_once_never_both_get_it(places: Places) -> None:
    """Both may be refused: then nothing is left, and the next start succeeds."""
    claims = [places.check(store, "mine").claim() for store in ("one", "two")]
    refused = await asyncio.gather(*claims, return_exceptions=True)
    assert len(await places.markers("mine")) == refused.count(None) <= 1


async def test_a_crash_between_marker_and_row_is_no_obstacle(places: Places) -> None:
    check = places.check("one", "mine")
    own = (await places.store("one").name_database("one")).database_id
    await places.objects("mine").put(f"identity/{own}-crashed", b"")
    await check.claim()
    await check.check()


@pytest.mark.parametrize("filled", [True, False])
async def test_objects_of_another_database_are_refused_by_name(places: Places, filled: bool) -> None:
    """The message names both and the remedy. Neither the start nor a later check accepts them."""
    await places.check("one", "mine").claim()
    if filled:
        await places.fill("one", "mine")
    before = await places.markers("mine")
    for attempt in (places.check("two", "mine").claim(), places.check("two", "mine").check()):
        with pytest.raises(WrongIdentity, match=r"the folder belongs to another database.*batchline adopt"):
            await attempt
    assert await places.markers("mine") == before
    await places.check("one", "mine").check()


async def test_another_folder_is_refused_even_if_it_is_empty(places: Places) -> None:
    await places.check("one", "mine").claim()
    with pytest.raises(WrongIdentity, match=r"the database keeps its objects elsewhere: the folder has no marker"):
        await places.check("one", "other").claim()
    assert await places.markers("other") == []


async def test_a_folder_that_is_exchanged_later_is_found(places: Places, tmp_path: Path) -> None:
    """Nothing is remembered between two checks."""
    check = places.check("one", "mine")
    await check.claim()
    (tmp_path / "mine").rename(tmp_path / "away")
    with pytest.raises(WrongIdentity):
        await check.check()
    (tmp_path / "away").rename(tmp_path / "mine")
    await check.check()


async def test_what_was_used_before_identities_is_adopted_if_it_fits(places: Places) -> None:
    await places.fill("one", "mine")
    await places.objects("mine").put("uploads/file-of-nobody", b"x")
    await places.check("one", "mine").claim()
    await places.check("one", "mine").check()


@pytest.mark.parametrize("key", ["uploads/file-1", "work/batch_1/1", "segments/batch_1/o-1", "results/batch_1/1"])
async def test_objects_that_an_old_database_does_not_know_are_refused(places: Places, key: str) -> None:
    await places.objects("mine").put(key, b"x")
    with pytest.raises(WrongIdentity, match=r"the folder holds objects, but the database knows none of them"):
        await places.check("one", "mine").claim()
    assert await places.markers("mine") == []


async def test_an_empty_folder_is_refused_by_an_old_database_with_files(places: Places) -> None:
    await places.fill("one", "mine")
    with pytest.raises(WrongIdentity, match=r"the database has files or batches, but the folder is empty"):
        await places.check("one", "other").claim()


async def test_a_restore_that_is_not_complete_is_no_service(places: Places) -> None:
    await places.objects("mine").put("restore/unfinished", b"")
    with pytest.raises(WrongIdentity, match="not complete"):
        await places.check("one", "mine").claim()


async def test_an_operator_can_adopt_anything(places: Places) -> None:
    """The database that had the objects before is refused from then on, and so are its objects."""
    await places.check("one", "mine").claim()
    await places.check("two", "other").claim()
    await places.check("two", "mine").adopt()
    await places.check("two", "mine").claim()
    for store, objects in (("one", "mine"), ("two", "other")):
        with pytest.raises(WrongIdentity):
            await places.check(store, objects).claim()


async def test_a_process_that_is_slower_accepts_what_another_one_wrote(places: Places) -> None:
    """The other process has the identity and stores a file, between two looks of this one."""
    slow, store = places.check("one", "mine"), places.store("one")
    needs_objects = store.needs_objects
    with pytest.MonkeyPatch.context() as patch:

        async def look_late() -> bool:
            patch.undo()
            await places.check("one", "mine").claim()
            await places.fill("one", "mine")
            return await needs_objects()

        patch.setattr(store, "needs_objects", look_late)
        await slow.claim()
    await slow.check()
    assert len(await places.markers("mine")) == 1
