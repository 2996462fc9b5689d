"""Keys, projects and organizations in every store: rules A2 and F3."""

import pytest

from batchline.domain.errors import InvalidCredentials, LeaseLost
from batchline.domain.records import Batch, Charge, Deletion
from batchline.domain.usage import NOTHING
from batchline.domain.webhooks import Webhook
from batchline.ports import NewKey
from tests.support.stores import DAY, LEASE, ME, NOW, World

pytestmark = pytest.mark.anyio


async def test_a_key_stands_for_its_project(world: World) -> None:
    """A1: the key and the project together identify the owner of a request."""
    owner = await world.owner()
    assert await world.store.owner_of(owner.key_id.encode(), owner.project_id) == owner


async def test_a_wrong_key_or_project_is_nobody(world: World) -> None:
    """A2: an unknown key, an unknown project and a key of another project cannot be distinguished."""
    alpha, beta = await world.owner("alpha"), await world.owner("beta")
    assert await world.store.owner_of(b"unknown", alpha.project_id) is None
    assert await world.store.owner_of(alpha.key_id.encode(), "unknown") is None
    assert await world.store.owner_of(alpha.key_id.encode(), beta.project_id) is None


async def test_a_revoked_key_is_nobody(world: World) -> None:
    """A2: the project's other keys stay valid."""
    owner, spare = await world.owner(), await world.owner()
    assert await world.store.revoke_key(owner.key_id, at=NOW + 1)
    assert await world.store.owner_of(owner.key_id.encode(), owner.project_id) is None
    assert await world.store.owner_of(spare.key_id.encode(), spare.project_id) == spare


async def test_a_key_is_revoked_once(world: World) -> None:
    """F3: the time of the first revocation is kept."""
    owner = await world.owner()
    assert await world.store.revoke_key(owner.key_id, at=NOW + 1)
    assert not await world.store.revoke_key(owner.key_id, at=NOW + 2)
    assert not await world.store.revoke_key("key_unknown", at=NOW + 2)
    assert [key.revoked_at for key in await world.store.keys()] == [NOW + 1]


async def test_a_rotated_key_is_the_same_key_with_another_secret(world: World) -> None:
    """F3: the old secret is refused at once."""
    owner = await world.owner()
    assert await world.store.rotate_key(owner.key_id, digest=b"new secret", hint="bl-new")
    assert await world.store.owner_of(owner.key_id.encode(), owner.project_id) is None
    assert await world.store.owner_of(b"new secret", owner.project_id) == owner
    assert [(key.id, key.hint) for key in await world.store.keys()] == [(owner.key_id, "bl-new")]


async def test_a_revoked_key_cannot_be_rotated_back_to_life(world: World) -> None:
    owner = await world.owner()
    await world.store.revoke_key(owner.key_id, at=NOW)
    assert not await world.store.rotate_key(owner.key_id, digest=b"new secret", hint="bl-new")
    assert await world.store.owner_of(b"new secret", owner.project_id) is None
    assert not await world.store.rotate_key("key_unknown", digest=b"another", hint="bl-x")


async def test_keys_of_one_project_name_share_project_and_organization(world: World) -> None:
    """F3: a project and an organization are created only if none of that name exist."""
    first, second, other = await world.owner("alpha"), await world.owner("alpha"), await world.owner("beta")
    assert first.key_id != second.key_id
    assert (first.project_id, first.organization_id) == (second.project_id, second.organization_id)
    assert other.project_id != first.project_id
    assert other.organization_id == first.organization_id


async def test_keys_are_listed_with_where_they_belong(world: World) -> None:
    """F3: keys are listed oldest first, and never with their secrets."""
    made = []
    for number, project in enumerate(["alpha", "beta"]):
        made.append(
            await world.store.create_key(
                NewKey(
                    key_id=f"key_{9 - number}",
                    digest=b"digest %d" % number,
                    hint=f"bl-{number}",
                    project=project,
                    project_id=f"00000000-0000-4000-8000-00000000000{number}",
                    organization="one",
                    organization_id=f"10000000-0000-4000-8000-00000000000{number}",
                    at=NOW + number,
                )
            )
        )
    keys = await world.store.keys()
    assert [(key.id, key.project_id, key.organization_id) for key in keys] == [
        (owner.key_id, owner.project_id, owner.organization_id) for owner in made
    ]
    assert [(key.organization, key.project, key.hint, key.created_at, key.revoked_at) for key in keys] == [
        ("one", "alpha", "bl-0", NOW, None),
        ("one", "beta", "bl-1", NOW + 1, None),
    ]


async def test_projects_of_one_name_in_two_organizations_are_two(world: World) -> None:
    """F3: two organizations may have projects of the same name."""
    one, two = await world.owner("alpha", "one"), await world.owner("alpha", "two")
    assert one.project_id != two.project_id
    assert one.organization_id != two.organization_id
    assert [(project.name, project.organization, project.id) for project in await world.store.projects()] == [
        ("alpha", name, owner.project_id)
        for name, owner in sorted((("one", one), ("two", two)), key=lambda pair: pair[1].project_id)
    ]
    assert {found.name for found in await world.store.organizations()} == {"one", "two"}


async def test_a_key_has_a_name_scopes_and_an_end(world: World) -> None:
    """F3, A2: an expired key is nobody, and is listed all the same."""
    made = []
    for number, (expires_at, scopes) in enumerate([(1, "read"), (10**11, "batch,read"), (None, "inference")]):
        new = NewKey(
            key_id=f"key_{number}",
            digest=b"digest %d" % number,
            hint="bl-…",
            project="alpha",
            project_id=f"00000000-0000-4000-8000-00000000000{number}",
            organization="one",
            organization_id=f"10000000-0000-4000-8000-00000000000{number}",
            at=NOW + number,
            name=f"name {number}",
            scopes=scopes,
            expires_at=expires_at,
        )
        made.append(await world.store.create_key(new))
    assert [(key.name, key.scopes, key.expires_at) for key in await world.store.keys()] == [
        ("name 0", "read", 1),
        ("name 1", "batch,read", 10**11),
        ("name 2", "inference", None),
    ]
    assert [await world.store.owner_of(b"digest %d" % number, None) for number in range(3)] == [None, *made[1:]]
    assert [owner.scopes for owner in made] == ["read", "batch,read", "inference"]
    assert [await world.store.is_valid_key(f"key_{number}") for number in range(4)] == [False, True, True, False]
    await world.store.revoke_key("key_1", at=NOW)
    assert not await world.store.is_valid_key("key_1")


async def test_a_key_alone_names_its_project(world: World) -> None:
    """A13: without a project id, the key's own project is taken."""
    owner, _ = await world.owner("alpha"), await world.owner("beta")
    assert await world.store.owner_of(owner.key_id.encode(), None) == owner
    assert await world.store.owner_of(b"unknown", None) is None


async def test_the_last_use_of_a_key_is_noted_and_never_goes_back(world: World) -> None:
    """Two processes may report uses in any order; the latest time is kept."""
    owner, other = await world.owner(), await world.owner()
    await world.store.touch_keys({owner.key_id: NOW + 5, "key_unknown": NOW})
    await world.store.touch_keys({owner.key_id: NOW + 3})
    used = {key.id: key.last_used_at for key in await world.store.keys()}
    assert used == {owner.key_id: NOW + 5, other.key_id: None}


async def test_a_store_that_is_there_says_so(world: World) -> None:
    """F5: the readiness probe commits a write."""
    await world.store.check()
    await world.store.check()


async def test_names_change_and_ids_stay(world: World) -> None:
    """F3: a name that another one has is refused, and a key goes on to stand for its project."""
    first, second = await world.owner("alpha"), await world.owner("beta")
    assert await world.store.rename_key(first.key_id, name="nightly")
    assert not await world.store.rename_key("key_unknown", name="x")
    assert await world.store.rename_project(first.project_id, name="gamma")
    assert await world.store.rename_project(first.project_id, name="gamma")
    assert not await world.store.rename_project(second.project_id, name="gamma")
    assert await world.store.rename_organization(first.organization_id, name="acme")
    other = await world.owner(organization="other")
    assert not await world.store.rename_organization(other.organization_id, name="acme")
    names = {key.id: (key.name, key.project, key.organization) for key in await world.store.keys()}
    assert names[first.key_id] == ("nightly", "gamma", "acme")
    assert names[second.key_id] == ("", "beta", "acme")
    assert await world.store.owner_of(first.key_id.encode(), first.project_id) == first


async def end(world: World, batch: Batch) -> None:
    """Record every line of a batch that runs, and publish it."""
    await world.record_all(await world.claim())
    finish = await world.finish()
    assert finish.batch.id == batch.id
    await world.publish(finish)


@pytest.mark.rule("F3", "A key is not deleted while a batch that it created has not ended.")
async def test_a_key_is_deleted_once_its_batches_have_ended(world: World) -> None:
    owner, spare = await world.owner(), await world.owner()
    batch = await world.running(owner)
    assert await world.store.delete_key(owner.key_id, at=NOW) == Deletion(open_batches=[batch.id])
    assert await world.store.owner_of(owner.key_id.encode(), owner.project_id) == owner
    await end(world, batch)
    assert (await world.store.delete_key(owner.key_id, at=NOW)).is_done
    assert await world.store.owner_of(owner.key_id.encode(), owner.project_id) is None
    assert [key.id for key in await world.store.keys()] == [spare.key_id]
    assert (await world.seen(batch)).key_id == owner.key_id, "its batches stay with the project"
    assert (await world.store.delete_key("key_unknown", at=NOW)).is_done


@pytest.mark.rule("F3", "A batch of another key or project hinders no deletion.")
async def test_batches_of_others_hinder_no_deletion(world: World) -> None:
    owner, colleague, stranger = await world.owner("alpha"), await world.owner("alpha"), await world.owner("beta")
    batch = await world.running(colleague)
    assert (await world.store.delete_key(owner.key_id, at=NOW)).is_done
    assert await world.store.delete_project(owner.project_id, at=NOW) == Deletion(open_batches=[batch.id])
    await end(world, batch)
    await world.running(stranger)
    assert (await world.store.delete_project(owner.project_id, at=NOW)).is_done


@pytest.mark.rule("F3", "A project is deleted with its keys, files and webhooks, once its batches have ended.")
async def test_a_project_is_deleted_with_its_keys_files_and_webhooks(world: World) -> None:
    owner, other = await world.owner("alpha"), await world.owner("beta")
    file, kept = await world.stored(owner), await world.stored(other)
    for project, name in ((owner, "wh_1"), (other, "wh_2")):
        webhook = Webhook(
            id=name,
            project_id=project.project_id,
            url="https://example.org",
            events="batch.completed",
            secret="whsec_",
            by_operator=True,
            created_at=NOW,
        )
        await world.store.create_webhook(webhook)
    batch = await world.running(owner)
    charge = Charge(model="m", requests=1, usage=NOTHING, cost=5)
    assert await world.store.delete_project(owner.project_id, at=NOW) == Deletion(open_batches=[batch.id])
    await end(world, batch)
    await world.store.charge(owner, charge, at=NOW)
    assert (await world.store.delete_project(owner.project_id, at=NOW)).is_done
    assert [key.id for key in await world.store.keys()] == [other.key_id]
    assert [project.id for project in await world.store.projects()] == [other.project_id]
    assert [webhook.id for webhook in await world.store.webhooks()] == ["wh_2"]
    assert await world.store.file(owner.project_id, file.id, at=NOW + 1) is None
    assert await world.expire_files(owner=ME, at=NOW + 1, limit=10) == [file.object_key]
    assert await world.store.file(other.project_id, kept.id, at=NOW + 1) == kept
    [entry] = await world.store.usage(since=0, until=NOW + DAY)
    assert (entry.project_id, entry.cost) == (owner.project_id, 5)
    assert entry.project.startswith("alpha (deleted "), "what it used can still be told from a new project's"


@pytest.mark.rule("F3", "The name of a deleted project or organization is free again.")
async def test_a_name_is_free_after_a_deletion(world: World) -> None:
    owner = await world.owner("alpha", "one")
    assert (await world.store.delete_project(owner.project_id, at=NOW)).is_done
    again = await world.owner("alpha", "one")
    assert again.project_id != owner.project_id
    assert again.organization_id == owner.organization_id
    assert (await world.store.delete_project(again.project_id, at=NOW)).is_done
    assert (await world.store.delete_organization(owner.organization_id, at=NOW)).is_done
    assert await world.store.organizations() == []
    third = await world.owner("alpha", "one")
    assert third.organization_id != owner.organization_id
    assert [(found.id, found.name) for found in await world.store.organizations()] == [(third.organization_id, "one")]


async def test_nothing_arrives_in_a_project_that_was_deleted(world: World) -> None:
    """An upload and a create that were let in before the deletion end without a trace."""
    owner = await world.owner()
    uploading = world.file(owner)
    await world.store.begin_upload(uploading, owner=ME, lease=LEASE)
    assert (await world.store.delete_project(owner.project_id, at=NOW)).is_done
    with pytest.raises(LeaseLost):
        await world.store.finish_upload(uploading, owner=ME)
    late = world.file(owner)
    await world.store.begin_upload(late, owner=ME, lease=LEASE)
    with pytest.raises(LeaseLost):
        await world.store.finish_upload(late, owner=ME)
    with pytest.raises(InvalidCredentials):
        await world.validating(owner)


@pytest.mark.rule("F3", "An organization is not deleted while it has a project or a balance.")
async def test_an_organization_is_deleted_without_projects_and_balance(world: World) -> None:
    owner = await world.owner("alpha", "one")
    organization_id = owner.organization_id
    await world.store.grant(organization_id, balance=7, credits=3, at=NOW)
    assert await world.store.delete_organization(organization_id, at=NOW) == Deletion(projects=["alpha"], balance=7)
    await world.store.delete_project(owner.project_id, at=NOW)
    assert await world.store.delete_organization(organization_id, at=NOW) == Deletion(balance=7)
    await world.store.set_funds(organization_id, balance=0, credits=None, at=NOW)
    assert (await world.store.delete_organization(organization_id, at=NOW)).is_done
    assert await world.store.grant(organization_id, balance=1, credits=0, at=NOW) is None
    assert await world.store.set_funds(organization_id, balance=1, credits=0, at=NOW) is None
    entries = await world.store.entries(organization_id)
    assert [(entry.balance, entry.credits) for entry in entries] == [(7, 3), (-7, 0)], "the ledger stays"


@pytest.mark.rule("G8", "An operator sets what a project may spend in a day.")
async def test_a_budget_is_known_to_workers_and_to_calls(world: World) -> None:
    owner = await world.owner()
    batch = await world.running(owner)
    for budget in (5_000, None):
        assert await world.store.set_daily_budget(owner.project_id, daily_budget=budget)
        found = await world.store.owner_of(owner.key_id.encode(), owner.project_id)
        assert found is not None
        assert found.daily_budget == budget
        assert [project.daily_budget for project in await world.store.projects()] == [budget]
        [signal] = await world.store.signals([batch.id])
        assert signal.daily_budget == budget
    await world.store.set_daily_budget(owner.project_id, daily_budget=7)
    claim = await world.store.claim(owner=ME, lease=LEASE, lines=10, bytes=1 << 20, alone=True, at=NOW)
    assert [leased.daily_budget for leased in claim.batches] == [7]
    assert not await world.store.set_daily_budget("unknown", daily_budget=7)


async def test_a_key_is_changed_if_it_is_still_as_it_was_read(world: World) -> None:
    owner = await world.owner()
    [key] = [key for key in await world.store.keys() if key.id == owner.key_id]
    assert await world.store.change_key(key, name="reader", scopes="read", expires_at=NOW + 60)
    [changed] = [key for key in await world.store.keys() if key.id == owner.key_id]
    assert (changed.name, changed.scopes, changed.expires_at) == ("reader", "read", NOW + 60)
    assert not await world.store.change_key(key, name="late", scopes=key.scopes, expires_at=None)
    assert await world.store.change_key(changed, name="reader", scopes="read", expires_at=None)
    [changed] = [key for key in await world.store.keys() if key.id == owner.key_id]
    assert changed.expires_at is None
    await world.store.revoke_key(owner.key_id, at=NOW)
    assert not await world.store.change_key(changed, name="x", scopes="read", expires_at=None)
