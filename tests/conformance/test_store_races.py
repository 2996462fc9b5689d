"""Races of many processes in every store: rules A11, B5, C10 to C12, D4, D5. Every run differs."""

import asyncio
from collections import Counter
from contextlib import suppress
from itertools import count
from random import Random

import pytest

from batchline.domain.bitmap import unsettled
from batchline.domain.errors import InvalidCredentials, LeaseLost
from batchline.domain.records import Batch, Charge, Owner, Shard
from batchline.domain.states import TERMINAL, BatchStatus
from batchline.domain.usage import NOTHING
from batchline.ports import FinalizeLease
from tests.support.service import PATIENCE
from tests.support.stores import LEASE, ME, NOW, World, cut, moved_on, segment

pytestmark = pytest.mark.anyio

SOON = NOW + 40


class Fleet:
    """Workers, finalizers and clients of some batches, all at once, until every batch is terminal."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._random, self._names = world, Random(seed), count(1)
        self._batches: dict[str, Batch] = {}
        self._expected = 12
        self.finished: dict[str, list[FinalizeLease]] = {}
        self.recorded: Counter[str] = Counter()

    @property
    def all_ended(self) -> bool:
        return len(self.finished) == self._expected

    async def run(self, owners: list[Owner]) -> None:
        async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
            for owner in owners:
                group.create_task(self._create(owner, self._expected // len(owners)))
            for _ in range(4):
                group.create_task(self._work())
            for _ in range(2):
                group.create_task(self._rescue())
                group.create_task(self._finish())
            group.create_task(self._disturb())

    async def _create(self, owner: Owner, batches: int) -> None:
        for _ in range(batches):
            shards = [self._random.randint(1, 4) for _ in range(self._random.randint(1, 4))]
            expires_at = self._random.choice([SOON, NOW + 9999, NOW + 9999])
            batch = await self._world.running(
                owner, shards=shards, model=self._random.choice("abc"), expires_at=expires_at
            )
            self._batches[batch.id] = batch

    async def _work(self) -> None:
        while not self.all_ended:
            name = f"worker {next(self._names)}"
            living = True
            while living and not self.all_ended:
                living = await self._live(name)
            await self._world.die(name)

    async def _live(self, name: str) -> bool:
        """Return whether the worker goes on."""
        for shard in await self._world.claim(holder=name, lines=self._random.randint(1, 8)):
            left = unsettled(shard.settled, shard.lines)
            some = sorted(self._random.sample(left, self._random.randint(0, len(left))))
            with suppress(LeaseLost):
                held = await self._record(shard, some, holder=name)
                await self._world.store.renew_shards(owner=name, lease=LEASE)
                end = self._random.choice(["all", "all", "hand back", "die"])
                if end == "die":
                    return False
                if end == "all":
                    await self._record(held, unsettled(held.settled, held.lines), holder=name)
                await self._world.store.release(held.batch_id, owner=name, shards=[(held.n, held.epoch)])
        return True

    async def _record(self, shard: Shard, lines: list[int], *, holder: str) -> Shard:
        if not lines:
            return shard
        after, progress = moved_on(shard, lines, failed=self._random.randint(0, len(lines)))
        charge = Charge(model=shard.model, requests=len(lines), usage=NOTHING, cost=len(lines))
        await self._world.store.record(
            shard.batch_id,
            owner=holder,
            progress=[progress],
            segment=segment(len(lines), failed=progress.failed),
            charges=[charge],
            at=NOW,
        )
        self.recorded[shard.batch_id] += len(lines)
        return after

    async def _rescue(self) -> None:
        while not self.all_ended:
            await self._world.rescue()
            await self._world.expire(at=SOON)
            await asyncio.sleep(0.01)

    async def _finish(self) -> None:
        while not self.all_ended:
            finish = await self._world.store.lease_finalizable(
                owner=f"finisher {next(self._names)}", lease=LEASE, at=NOW + 100
            )
            if finish is None:
                await asyncio.sleep(0.01)
                continue
            with suppress(LeaseLost):
                await self._world.publish(finish)
                self.finished.setdefault(finish.batch.id, []).append(finish)

    async def _disturb(self) -> None:
        while not self.all_ended:
            if self._batches and self._random.random() < 0.05:
                batch = self._random.choice(list(self._batches.values()))
                await self._world.store.cancel_batch(batch.project_id, batch.id, at=NOW + 1)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.proof) for seed in (1, 2))])
async def test_whatever_happens_at_once_every_line_counts_once(world: World, seed: int) -> None:
    """C11, C12, D4, D5: despite deaths, cancels and expiry each line is recorded and charged once or left over.

    Each batch ends once, with everything that was recorded.
    """
    owners = [await world.owner(name) for name in ("alpha", "beta", "gamma")]
    fleet = Fleet(world, seed)
    await fleet.run(owners)
    for batch_id, finishes in fleet.finished.items():
        (finish,) = finishes
        batch = finish.batch
        left = sum(len(unsettled(shard.settled, shard.lines)) for shard in finish.leftovers)
        assert batch.completed + batch.failed == fleet.recorded[batch_id]
        assert batch.completed + batch.failed + left == batch.total
        assert left == 0 or batch.stop is not None or {shard.strikes for shard in finish.leftovers} == {3}
        data = b"".join(one.data or b"" for one in await world.store.segments(batch_id, after=0, limit=99))
        assert (data.count(b"+"), data.count(b"-")) == (batch.completed, batch.failed)
        seen = await world.seen(batch)
        assert seen.status in TERMINAL
        assert (seen.status == "cancelled") is (seen.cancelling_at is not None)
    (organization,) = await world.store.organizations()
    entries = await world.store.entries(organization.id)
    assert organization.balance == sum(entry.balance for entry in entries) == -fleet.recorded.total()
    assert await world.claim() == []


async def test_pages_miss_nothing_that_becomes_visible_meanwhile(world: World) -> None:
    """B5, C9b: a reader that continues after the last file it saw gets every file that was stored since."""
    owner = await world.owner()
    files = [world.file(owner) for _ in range(60)]
    seen: list[str] = []

    async def upload(batch: int) -> None:
        for file in files[batch::6]:
            await world.store.begin_upload(file, owner=ME, lease=LEASE)
            await world.store.finish_upload(file, owner=ME)

    async def read_on() -> int:
        after = seen[-1] if seen else None
        page = await world.store.files(owner.project_id, purpose=None, ascending=True, after=after, limit=99, at=NOW)
        assert page is not None
        seen.extend(file.id for file in page)
        return len(page)

    uploads = asyncio.gather(*(upload(batch) for batch in range(6)))
    while not uploads.done():
        await read_on()
    while await read_on():
        pass
    assert sorted(seen) == sorted(file.id for file in files)


async def test_who_claims_at_once_from_one_lane_gets_something(world: World) -> None:
    """D8: as long as shards are open, no claim returns empty."""
    await world.running(shards=[1] * 40)
    for _ in range(4):
        claims = await asyncio.gather(*(world.claim(holder=f"worker {n}", lines=1) for n in range(8)))
        assert [len(shards) for shards in claims] == [1] * 8


async def test_what_is_created_at_once_in_one_lane_is_all_claimed(world: World) -> None:
    """D8: the result is the same as if the claims had run one after the other."""
    owner, other = await world.owner("alpha"), await world.owner("beta")
    for model in "abcd":
        batches = await asyncio.gather(*(world.running(owner, shards=[2] * 4, model=model) for _ in range(6)))
        rival = await world.running(other, shards=[2] * 24, model=model)
        shards = [shard for _ in range(24) for shard in await world.claim(lines=2)]
        shares = Counter(shard.batch_id == rival.id for shard in shards)
        assert abs(shares[True] - shares[False]) <= 1
        shards += await world.claim() + await world.claim()
        assert len(shards) == len({(shard.batch_id, shard.n) for shard in shards}) == 48
        assert {shard.batch_id for shard in shards} == {batch.id for batch in [*batches, rival]}


async def test_a_batch_is_cancelled_or_started_never_both(world: World) -> None:
    """C6, C10: a cancel at the moment of the start either finds the batch in progress or prevents its start."""
    owner = await world.owner()
    for _ in range(10):
        batch = await world.validating(owner)
        start = world.store.start_batch(batch.id, epoch=1, shards=cut([1, 1]), total=2, work_key="w", at=NOW)
        created, found = await asyncio.gather(
            start, world.store.cancel_batch(batch.project_id, batch.id, at=NOW), return_exceptions=True
        )
        assert isinstance(found, tuple)
        cancelled, has_ended = found
        assert isinstance(created, LeaseLost) == has_ended == (cancelled.status is BatchStatus.CANCELLED)
        assert await world.claim() == []
        if not has_ended:
            finish = await world.finish()
            assert len(finish.leftovers) == 2
            await world.publish(finish)
        seen = await world.seen(batch)
        assert (seen.status, seen.in_progress_at is None) == ("cancelled", cancelled.status == "cancelled")


async def test_nobody_gets_free_credits_twice_or_never(world: World) -> None:
    """F2: several processes start metering while organizations are created."""
    makers = [world.owner(organization=f"organization {n % 6}") for n in range(12)]
    starts = [world.store.start_metering(5, at=NOW) for _ in range(4)]
    await asyncio.gather(*makers, *starts)
    assert [found.credits for found in await world.store.organizations()] == [5] * 6


class Tenants:
    """Operators who create and delete, and clients who use what there is."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._random = world, Random(seed)
        self.owners: list[Owner] = []

    async def create(self) -> None:
        for _ in range(8):
            await self._pause()
            self.owners.append(await self._world.owner(self._random.choice(["one", "two"]), "org"))

    async def use(self) -> None:
        for _ in range(12):
            await self._pause()
            with suppress(LeaseLost, InvalidCredentials, IndexError):
                await self._world.stored(self._random.choice(self.owners))
                await self._world.validating(self._random.choice(self.owners))

    async def delete(self) -> None:
        store = self._world.store
        for _ in range(8):
            await self._pause()
            for project in await store.projects():
                if self._random.random() < 0.5:
                    await store.delete_project(project.id, at=NOW)
            for organization in await store.organizations():
                await store.delete_organization(organization.id, at=NOW)

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.random() / 200)


@pytest.mark.rule("F3", "What is deleted gets no new key, upload or batch, however these race.")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.proof) for seed in (1, 2))])
async def test_deletions_beside_keys_uploads_and_creates(world: World, seed: int) -> None:
    tenants, store = Tenants(world, seed), world.store
    async with asyncio.timeout(PATIENCE), asyncio.TaskGroup() as group:
        for action in (tenants.create, tenants.create, tenants.use, tenants.use, tenants.delete):
            group.create_task(action())
    projects = {project.id: project for project in await store.projects()}
    organizations = {organization.id for organization in await store.organizations()}
    assert {key.project_id for key in await store.keys()} <= projects.keys()
    assert {project.organization_id for project in projects.values()} <= organizations
    for owner in tenants.owners:
        if owner.project_id not in projects:
            assert await store.owner_of(owner.key_id.encode(), owner.project_id) is None
            assert not await store.files(
                owner.project_id, purpose=None, ascending=True, after=None, limit=100, at=NOW + 1
            )
