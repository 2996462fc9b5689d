"""Keys, projects and organizations in every store: rules A2 and F3."""

import pytest

from batchline.ports import NewKey
from tests.support.stores import NOW, World

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
