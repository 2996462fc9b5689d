"""Organizations, projects and keys."""

from msgspec import convert

from batchline.domain.records import Key, Owner
from batchline.store.sql import Database, Script, change, one, rows

_ORGANIZATION = "default"


class SqlAccounts:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def owner_of(self, digest: bytes, project_id: str) -> Owner | None:
        row = await self._database.read(lambda: one("key_owner", digest=digest, project_id=project_id))
        return Owner(**row) if row else None

    async def create_key(
        self, *, key_id: str, digest: bytes, hint: str, project: str, project_id: str, organization_id: str, at: int
    ) -> Owner:
        def script() -> Script[Owner]:
            yield from change("insert_organization", organization_id=organization_id, name=_ORGANIZATION, at=at)
            organization = (yield from rows("organization_by_name", name=_ORGANIZATION))[0]
            yield from change(
                "insert_project", project_id=project_id, organization_id=organization["id"], name=project, at=at
            )
            home = (yield from rows("project_by_name", name=project))[0]
            yield from change(
                "insert_key", key_id=key_id, project_id=home["project_id"], digest=digest, hint=hint, at=at
            )
            return Owner(key_id=key_id, project_id=home["project_id"], organization_id=home["organization_id"])

        return await self._database.write(script)

    async def keys(self) -> list[Key]:
        return [convert(dict(row), Key) for row in await self._database.read(lambda: rows("keys"))]

    async def revoke_key(self, key_id: str, *, at: int) -> bool:
        return bool(await self._database.write(lambda: change("revoke_key", key_id=key_id, at=at)))

    async def rotate_key(self, key_id: str, *, digest: bytes, hint: str) -> bool:
        return bool(await self._database.write(lambda: change("rotate_key", key_id=key_id, digest=digest, hint=hint)))
