"""Money in every store: rules A3, D4, F2, F3. An organization's entries always sum to its balance and credits."""

import asyncio

import pytest

from batchline.domain.errors import LeaseLost
from batchline.domain.records import Balances, Charge, Organization, Owner
from batchline.domain.usage import Usage
from tests.support.stores import ME, NOW, World, moved_on, segment

pytestmark = pytest.mark.anyio

HOUR = 3600
TOKENS = Usage(input_tokens=10, cached_tokens=4, output_tokens=3, reasoning_tokens=1)


def charge(cost: int, *, model: str = "m", requests: int = 1, usage: Usage = TOKENS) -> Charge:
    return Charge(model=model, requests=requests, usage=usage, cost=cost)


async def organization(world: World, owner: Owner) -> Organization:
    return next(found for found in await world.store.organizations() if found.id == owner.organization_id)


async def money(world: World, owner: Owner) -> tuple[int, int]:
    """Return an organization's balance and credits after checking that its entries sum to them."""
    found, entries = await organization(world, owner), await world.store.entries(owner.organization_id)
    assert sum(entry.balance for entry in entries) == found.balance
    assert sum(entry.credits for entry in entries) == found.credits
    return found.balance, found.credits


async def costs(world: World) -> list[int]:
    return [entry.cost for entry in await world.store.usage(since=0, until=NOW * 2)]


@pytest.mark.rule("F2", "A new organization starts with the free credits.")
@pytest.mark.rule("F2", "Nobody gets them twice.")
async def test_a_new_organization_starts_with_the_free_credits(world: World) -> None:
    """F2: organizations created before metering get the credits when it starts, and none gets them twice."""
    early = await world.owner(organization="early")
    await world.store.start_metering(5, at=NOW)
    late, again = await world.owner(organization="late"), await world.owner("other", organization="late")
    assert [await money(world, owner) for owner in (early, late, again)] == [(0, 5)] * 3
    assert (late.funds, again.funds) == (5, 5)
    await world.store.start_metering(7, at=NOW)
    assert [await money(world, owner) for owner in (early, late)] == [(0, 5)] * 2
    await world.store.start_metering(None, at=NOW)
    assert await money(world, await world.owner(organization="unmetered")) == (0, 0)


async def test_an_organization_that_was_given_money_gets_no_free_credits(world: World) -> None:
    """The operator has set its funds explicitly."""
    owner = await world.owner()
    await world.store.set_funds(owner.organization_id, balance=0, credits=None, at=NOW)
    await world.store.start_metering(5, at=NOW)
    assert await money(world, owner) == (0, 0)


@pytest.mark.rule("F3", "It sets and does not add.")
async def test_balance_and_credits_are_set_each_by_itself(world: World) -> None:
    """F3: the command ``set-balance`` works with and without ``--credits``."""
    owner = await world.owner()
    set_to = world.store.set_funds
    assert (await set_to(owner.organization_id, balance=100, credits=None, at=NOW)) == await organization(world, owner)
    assert await money(world, owner) == (100, 0)
    await set_to(owner.organization_id, balance=30, credits=7, at=NOW)
    assert await money(world, owner) == (30, 7)
    await set_to(owner.organization_id, balance=None, credits=0, at=NOW)
    assert await money(world, owner) == (30, 0)
    assert await set_to("unknown", balance=1, credits=1, at=NOW) is None


@pytest.mark.rule("D4", "Free credits are spent first.")
async def test_credits_go_first_and_the_balance_may_go_below_zero(world: World) -> None:
    """D4: lines that were in flight when the money ran out are charged, so the balance may go below zero."""
    owner = await world.owner()
    await world.store.set_funds(owner.organization_id, balance=10, credits=5, at=NOW)
    seen = []
    for cost in (3, 4, 20):
        await world.store.charge(owner, charge(cost), at=NOW)
        seen.append(await money(world, owner))
    assert seen == [(10, 2), (8, 0), (-12, 0)]
    found = await world.store.owner_of(owner.key_id.encode(), owner.project_id)
    assert found is not None
    assert found.funds == -12


@pytest.mark.rule("D4", "A line is charged in the transaction that records it.")
async def test_a_line_is_charged_with_its_record(world: World) -> None:
    """D4: lines are recorded and charged in one transaction, which returns what the organization has left."""
    owner, stranger = await world.owner(organization="one"), await world.owner(organization="two")
    await world.store.set_funds(owner.organization_id, balance=100, credits=0, at=NOW)
    batch = await world.running(owner, shards=[2])
    (shard,) = await world.claim()
    _, progress = moved_on(shard, [0, 1])
    left = await world.store.record(
        batch.id, owner=ME, progress=[progress], segment=segment(2), charges=[charge(30), charge(1, model="n")], at=NOW
    )
    assert left == Balances(funds=69)
    assert await money(world, owner) == (69, 0)
    assert await money(world, stranger) == (0, 0)


@pytest.mark.rule("D4", "ShardStore that was not recorded is not charged.")
async def test_a_record_that_is_refused_charges_nothing(world: World) -> None:
    """D4, D5: lines that a worker records after it lost its lease are not charged."""
    owner = await world.owner()
    await world.store.set_funds(owner.organization_id, balance=100, credits=0, at=NOW)
    batch = await world.running(owner, shards=[2])
    (shard,) = await world.claim()
    await world.store.release(batch.id, owner=ME, shards=[(shard.n, shard.epoch)])
    with pytest.raises(LeaseLost):
        await world.record(shard, [0], charges=[charge(30)])
    assert await money(world, owner) == (100, 0)
    assert await costs(world) == []


async def test_usage_of_a_key_model_and_batch_shares_an_entry_an_hour(world: World) -> None:
    """The ledger grows with the hours of use, not with the number of lines."""
    owner = await world.owner()
    batch = await world.running(owner, shards=[4])
    (shard,) = await world.claim()
    hour = NOW - NOW % HOUR
    shard = await world.record(shard, [0], charges=[charge(1)], at=hour)
    shard = await world.record(shard, [1], charges=[charge(2)], at=hour + HOUR - 1)
    shard = await world.record(shard, [2], charges=[charge(4)], at=hour + HOUR)
    await world.record(shard, [3], charges=[charge(8, model="n")], at=hour)
    await world.store.charge(owner, charge(16), at=hour)
    entries = await world.store.usage(since=0, until=NOW * 2)
    assert [(entry.since, entry.batch_id, entry.model, entry.requests, entry.cost) for entry in entries] == [
        (hour, batch.id, "m", 2, 3),
        (hour, batch.id, "n", 1, 8),
        (hour, None, "m", 1, 16),
        (hour + HOUR, batch.id, "m", 1, 4),
    ]
    unused = await world.running(owner, shards=[1])
    assert [bill.cost for bill in await world.store.bills([unused, batch])] == [0, 15]
    assert await world.store.bills([]) == []
    first = entries[0]
    assert (first.input_tokens, first.cached_tokens, first.output_tokens, first.reasoning_tokens) == (20, 8, 6, 2)
    assert (first.organization, first.project, first.project_id) == ("default", "alpha", owner.project_id)


@pytest.mark.rule("F3", "Usage includes the time since and excludes the time until.")
async def test_usage_is_told_for_a_time_and_a_project(world: World) -> None:
    """F3: ``since`` is inclusive, ``until`` is exclusive."""
    alpha, beta = await world.owner("alpha"), await world.owner("beta")
    for at, owner, cost in ((0, alpha, 1), (HOUR, alpha, 2), (2 * HOUR, alpha, 4), (HOUR, beta, 8)):
        await world.store.charge(owner, charge(cost), at=at)
    entries = await world.store.usage(since=HOUR, until=2 * HOUR)
    assert [entry.cost for entry in entries] == [2, 8]
    entries = await world.store.usage(since=0, until=9 * HOUR, project_id=beta.project_id)
    assert [entry.cost for entry in entries] == [8]


async def test_a_revoked_key_keeps_its_entries(world: World) -> None:
    owner = await world.owner()
    await world.store.charge(owner, charge(3), at=NOW)
    await world.store.revoke_key(owner.key_id, at=NOW)
    assert await costs(world) == [3]


async def test_charges_made_at_once_all_count(world: World) -> None:
    """Synchronous calls that end at the same moment are all charged."""
    owner = await world.owner()
    await world.store.set_funds(owner.organization_id, balance=1000, credits=20, at=NOW)
    await asyncio.gather(*(world.store.charge(owner, charge(cost), at=NOW) for cost in range(20)))
    assert await money(world, owner) == (1020 - 190, 0)
    assert await costs(world) == [190]


@pytest.mark.rule("F3", "A new balance reaches the workers that run the organization's batches.")
async def test_whoever_holds_a_batch_hears_what_its_organization_has(world: World) -> None:
    """D4: a worker learns the funds with its lease and with every signal."""
    owner = await world.owner()
    await world.store.set_funds(owner.organization_id, balance=10, credits=5, at=NOW)
    batch = await world.running(owner)
    claim = await world.store.claim(owner="me", lease=30, lines=10, bytes=10_000, alone=True, at=NOW)
    assert [(leased.organization_id, leased.funds) for leased in claim.batches] == [(owner.organization_id, 15)]
    await world.store.charge(owner, charge(20), at=NOW)
    assert [signal.funds for signal in await world.store.signals([batch.id])] == [-5]


async def test_grants_and_charges_at_once_lose_nothing(world: World) -> None:
    """F3: what is added while lines are charged is not overwritten by what was read before."""
    owner = await world.owner()
    await world.store.set_funds(owner.organization_id, balance=100, credits=0, at=NOW)
    grants = [world.store.grant(owner.organization_id, balance=10, credits=1, at=NOW) for _ in range(10)]
    charges = [world.store.charge(owner, charge(7), at=NOW) for _ in range(10)]
    await asyncio.gather(*grants, *charges)
    assert sum(await money(world, owner)) == 100 + 10 * 11 - 10 * 7
    assert await world.store.grant("no-such-organization", balance=1, credits=0, at=NOW) is None
