"""Stores organizations, projects and API keys."""

from collections.abc import Mapping

from msgspec import convert

from batchline.domain.records import Key, Organization, Owner, Project
from batchline.ports import NewKey
from batchline.store.ledger import give_free_credits
from batchline.store.sql import Database, Script, change, change_many, one, rows


class SqlAccounts:
    """The Accounts port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def owner_of(self, digest: bytes, project_id: str | None) -> Owner | None:
        row = await self._database.read(lambda: one("key_owner", digest=digest, project_id=project_id))
        return Owner(**row) if row else None

    async def create_key(self, new: NewKey) -> Owner:
        def script() -> Script[Owner]:
            organization_id = yield from _find_or_create_organization(new)
            yield from change(
                "insert_project",
                project_id=new.project_id,
                organization_id=organization_id,
                name=new.project,
                at=new.at,
            )
            project = (yield from rows("project_by_name", organization_id=organization_id, name=new.project))[0]
            yield from change(
                "insert_key",
                key_id=new.key_id,
                project_id=project["id"],
                digest=new.digest,
                hint=new.hint,
                name=new.name,
                scopes=new.scopes,
                at=new.at,
                expires_at=new.expires_at,
            )
            organization = (yield from rows("organization", organization_id=organization_id))[0]
            return Owner(
                key_id=new.key_id,
                project_id=project["id"],
                organization_id=organization_id,
                scopes=new.scopes,
                funds=organization["balance"] + organization["credits"],
            )

        return await self._database.write(script)

    async def is_valid_key(self, key_id: str) -> bool:
        return bool(await self._database.read(lambda: rows("valid_key", key_id=key_id)))

    async def keys(self) -> list[Key]:
        return [convert(dict(row), Key) for row in await self._database.read(lambda: rows("keys"))]

    async def organizations(self) -> list[Organization]:
        return [convert(dict(row), Organization) for row in await self._database.read(lambda: rows("organizations"))]

    async def projects(self) -> list[Project]:
        return [convert(dict(row), Project) for row in await self._database.read(lambda: rows("projects"))]

    async def touch_keys(self, key_usage: Mapping[str, int]) -> None:
        used = [{"key_id": key_id, "at": at} for key_id, at in key_usage.items()]
        await self._database.write(lambda: change_many("touch_key", used))

    async def revoke_key(self, key_id: str, *, at: int) -> bool:
        return bool(await self._database.write(lambda: change("revoke_key", key_id=key_id, at=at)))

    async def rotate_key(self, key_id: str, *, digest: bytes, hint: str) -> bool:
        return bool(await self._database.write(lambda: change("rotate_key", key_id=key_id, digest=digest, hint=hint)))

    async def rename_key(self, key_id: str, *, name: str) -> bool:
        return bool(await self._database.write(lambda: change("rename_key", key_id=key_id, name=name)))

    async def rename_project(self, project_id: str, *, name: str) -> bool:
        return bool(await self._database.write(lambda: change("rename_project", project_id=project_id, name=name)))

    async def rename_organization(self, organization_id: str, *, name: str) -> bool:
        renamed = await self._database.write(
            lambda: change("rename_organization", organization_id=organization_id, name=name)
        )
        return bool(renamed)


def _find_or_create_organization(new: NewKey) -> Script[str]:
    created = yield from change(
        "insert_organization", organization_id=new.organization_id, name=new.organization, at=new.at
    )
    if created:
        yield from give_free_credits(new.organization_id, at=new.at)
    organization_id: str = (yield from rows("organization_by_name", name=new.organization))[0]["id"]
    return organization_id
