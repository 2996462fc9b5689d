"""Stores the ids of the database and of the objects that belong to it."""

from msgspec import convert

from batchline.domain.identity import Identity
from batchline.store.sql import Database, Script, change, rows


class SqlIdentity:
    """The IdentityStore port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def identity(self) -> Identity:
        return await self._database.read(_identity)

    async def name_database(self, database_id: str) -> Identity:
        def script() -> Script[Identity]:
            yield from change("name_database", database_id=database_id)
            return (yield from _identity())

        return await self._database.write(script)

    async def bind_objects(self, objects_id: str) -> Identity:
        def script() -> Script[Identity]:
            yield from change("bind_objects", objects_id=objects_id)
            return (yield from _identity())

        return await self._database.write(script)

    async def renew_identity(self, *, database_id: str, objects_id: str) -> None:
        await self._database.write(lambda: change("renew_identity", database_id=database_id, objects_id=objects_id))

    async def needs_objects(self) -> bool:
        found = await self._database.read(lambda: rows("needs_objects"))
        return bool(found[0]["needed"])


def _identity() -> Script[Identity]:
    return convert(dict((yield from rows("identity"))[0]), Identity)
