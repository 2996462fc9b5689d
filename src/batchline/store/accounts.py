"""Stores organizations, projects and API keys."""

from collections.abc import Mapping

from msgspec import convert

from batchline.domain.records import Deletion, Key, Organization, Owner, Project
from batchline.ports import NewKey
from batchline.store.ledger import give_free_credits
from batchline.store.sql import Database, Script, change, change_many, one, rows

_NAMED_BATCHES = 10
"""Open batches that a refused deletion names."""


class SqlAccounts:
    """The Accounts port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def owner_of(self, digest: bytes, project_id: str | None) -> Owner | None:
        row = await self._database.read(lambda: one("key_owner", digest=digest, project_id=project_id))
        return Owner(**row) if row else None

    async def create_key(self, new: NewKey) -> Owner:
        def script() -> Script[Owner]:
            organization_id, project_id = yield from _find_or_create_project(new)
            yield from change(
                "insert_key",
                key_id=new.key_id,
                project_id=project_id,
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
                project_id=project_id,
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

    async def change_key(self, key: Key, *, name: str, scopes: str, expires_at: int | None) -> bool:
        changed = await self._database.write(
            lambda: change(
                "change_key",
                key_id=key.id,
                name=name,
                scopes=scopes,
                expires_at=expires_at,
                former_name=key.name,
                former_scopes=key.scopes,
                former_expires_at=key.expires_at or 0,
            )
        )
        return bool(changed)

    async def rename_project(self, project_id: str, *, name: str) -> bool:
        return bool(await self._database.write(lambda: change("rename_project", project_id=project_id, name=name)))

    async def rename_organization(self, organization_id: str, *, name: str) -> bool:
        renamed = await self._database.write(
            lambda: change("rename_organization", organization_id=organization_id, name=name)
        )
        return bool(renamed)

    async def set_daily_budget(self, project_id: str, *, daily_budget: int | None) -> bool:
        changed = await self._database.write(
            lambda: change("set_daily_budget", project_id=project_id, daily_budget=daily_budget)
        )
        return bool(changed)

    async def delete_key(self, key_id: str, *, at: int) -> Deletion:
        def script() -> Script[Deletion]:
            key = yield from one("project_of_key", key_id=key_id)
            if key is None:
                return Deletion()
            # A create locks the project too, so no batch begins meanwhile.
            yield from one("lock_project", project_id=key["project_id"])
            open_batches = yield from _find_open_batches(key["project_id"], key_id=key_id)
            if open_batches:
                return Deletion(open_batches=open_batches)
            yield from change("delete_key", key_id=key_id, at=at)
            return Deletion()

        return await self._database.write(script)

    async def delete_project(self, project_id: str, *, at: int) -> Deletion:
        def script() -> Script[Deletion]:
            yield from one("lock_project", project_id=project_id)
            open_batches = yield from _find_open_batches(project_id, key_id=None)
            if open_batches:
                return Deletion(open_batches=open_batches)
            yield from change("delete_keys_of_project", project_id=project_id, at=at)
            yield from change("abandon_uploads_of_project", project_id=project_id, at=at)
            yield from change("expire_files_of_project", project_id=project_id)
            yield from change("delete_deliveries_of_project", project_id=project_id)
            yield from change("delete_webhooks_of_project", project_id=project_id)
            yield from change("delete_project", project_id=project_id, at=at)
            return Deletion()

        return await self._database.write(script)

    async def delete_organization(self, organization_id: str, *, at: int) -> Deletion:
        def script() -> Script[Deletion]:
            organization = yield from one("lock_organization", organization_id=organization_id)
            projects = yield from rows("projects_of_organization", organization_id=organization_id)
            deletion = Deletion(
                projects=[project["name"] for project in projects],
                balance=0 if organization is None else organization["balance"],
            )
            if deletion.is_done:
                yield from change("delete_organization", organization_id=organization_id, at=at)
            return deletion

        return await self._database.write(script)


def _find_open_batches(project_id: str, *, key_id: str | None) -> Script[list[str]]:
    found = yield from rows("open_batches_of_project", project_id=project_id, key_id=key_id, limit=_NAMED_BATCHES)
    return [row["id"] for row in found]


def _find_or_create_project(new: NewKey) -> Script[tuple[str, str]]:
    """Return the organization and the project of a new key. Both are locked, so that neither is deleted meanwhile."""
    while True:
        organization_id = yield from _find_or_create_organization(new)
        created = yield from change(
            "insert_project",
            project_id=new.project_id,
            organization_id=organization_id,
            name=new.project,
            at=new.at,
        )
        named = yield from one("project_by_name", organization_id=organization_id, name=new.project)
        project = named and (yield from one("lock_project", project_id=named["id"]))
        organization = yield from one("lock_organization", organization_id=organization_id)
        # A project or organization that was deleted meanwhile has given up its name: the next round creates another.
        if project and organization and project["deleted_at"] is organization["deleted_at"] is None:
            return organization_id, project["id"]
        if created:
            yield from change("discard_project", project_id=new.project_id)


def _find_or_create_organization(new: NewKey) -> Script[str]:
    while True:
        created = yield from change(
            "insert_organization", organization_id=new.organization_id, name=new.organization, at=new.at
        )
        if created:
            yield from give_free_credits(new.organization_id, at=new.at)
        # One that had the name may have been deleted between the two statements.
        named = yield from one("organization_by_name", name=new.organization)
        if named is not None:
            organization_id: str = named["id"]
            return organization_id
