"""Sessions of the console, in every store."""

import pytest

from tests.support.stores import NOW, World

pytestmark = pytest.mark.anyio

_LATER = NOW + 10**9
"""Later than the time of any store that a test runs on."""


async def test_a_session_stands_for_its_key(world: World) -> None:
    owner = await world.owner("alpha")
    assert await world.store.open_session(b"secret", key_id=owner.key_id, expires_at=_LATER)
    session = await world.store.session(b"secret")
    assert session is not None
    assert (session.owner, session.project, session.expires_at) == (owner, "alpha", _LATER)
    assert await world.store.session(b"another") is None


async def test_a_session_ends_when_it_is_closed_or_expires(world: World) -> None:
    owner = await world.owner()
    await world.store.open_session(b"closed", key_id=owner.key_id, expires_at=_LATER)
    await world.store.open_session(b"expired", key_id=owner.key_id, expires_at=1)
    await world.store.open_session(b"kept", key_id=owner.key_id, expires_at=_LATER)
    await world.store.close_session(b"closed")
    assert [await world.store.session(each) is not None for each in (b"closed", b"expired", b"kept")] == [
        False,
        False,
        True,
    ]


async def test_a_session_ends_with_its_key(world: World) -> None:
    revoked, rotated = await world.owner(), await world.owner()
    for owner in (revoked, rotated):
        await world.store.open_session(owner.key_id.encode(), key_id=owner.key_id, expires_at=_LATER)
    await world.store.revoke_key(revoked.key_id, at=NOW)
    await world.store.rotate_key(rotated.key_id, digest=b"new secret", hint="bl-new")
    assert await world.store.session(revoked.key_id.encode()) is None
    assert await world.store.session(rotated.key_id.encode()) is None


async def test_a_key_that_is_not_valid_opens_no_session(world: World) -> None:
    owner = await world.owner()
    await world.store.revoke_key(owner.key_id, at=NOW)
    assert not await world.store.open_session(b"secret", key_id=owner.key_id, expires_at=_LATER)
    assert not await world.store.open_session(b"secret", key_id="key_unknown", expires_at=_LATER)


async def test_the_administrator_opens_a_project_in_a_session_and_closes_it(world: World) -> None:
    owner = await world.owner("alpha")
    await world.store.open_admin_session(b"admin", expires_at=_LATER)
    session = await world.store.admin_session(b"admin")
    assert session is not None
    assert (session.project, session.expires_at) == (None, _LATER)
    await world.store.open_in_admin_session(b"admin", key_id=owner.key_id)
    session = await world.store.admin_session(b"admin")
    assert session is not None
    assert session.project is not None
    assert (session.project.owner, session.project.project) == (owner, "alpha")
    await world.store.open_in_admin_session(b"admin", key_id=None)
    session = await world.store.admin_session(b"admin")
    assert session is not None
    assert session.project is None


async def test_a_project_is_not_open_any_more_once_its_key_is_revoked(world: World) -> None:
    owner = await world.owner()
    await world.store.open_admin_session(b"admin", expires_at=_LATER)
    await world.store.open_in_admin_session(b"admin", key_id=owner.key_id)
    await world.store.revoke_key(owner.key_id, at=NOW)
    session = await world.store.admin_session(b"admin")
    assert session is not None
    assert session.project is None


async def test_a_session_of_the_administrator_ends_when_it_is_closed_or_expires(world: World) -> None:
    for digest, expires_at in ((b"expired", 1), (b"closed", _LATER), (b"kept", _LATER)):
        await world.store.open_admin_session(digest, expires_at=expires_at)
    await world.store.close_admin_session(b"closed")
    assert await world.store.admin_session(b"expired") is None
    assert await world.store.admin_session(b"closed") is None
    assert await world.store.admin_session(b"kept") is not None
    assert await world.store.session(b"kept") is None, "it is no session of a key"
