"""Stores who is signed in to the console."""

from batchline.domain.records import AdminSession, Owner, Session
from batchline.store.sql import Database, Row, Script, change, one

_OF_OWNER = ("key_id", "scopes", "project_id", "organization_id", "funds")
_OF_SESSION = ("key_name", "key_hint", "project", "organization", "expires_at")


class SqlSessions:
    """The SessionStore port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def open_session(self, digest: bytes, *, key_id: str, expires_at: int) -> bool:
        def script() -> Script[bool]:
            yield from change("delete_expired_sessions")
            return bool((yield from change("insert_session", digest=digest, key_id=key_id, expires_at=expires_at)))

        return await self._database.write(script)

    async def session(self, digest: bytes) -> Session | None:
        row = await self._database.read(lambda: one("session", digest=digest))
        return None if row is None else _session(row)

    async def close_session(self, digest: bytes) -> None:
        await self._database.write(lambda: change("delete_session", digest=digest))

    async def open_admin_session(self, digest: bytes, *, expires_at: int) -> None:
        def script() -> Script[None]:
            yield from change("delete_expired_admin_sessions")
            yield from change("insert_admin_session", digest=digest, expires_at=expires_at)

        await self._database.write(script)

    async def admin_session(self, digest: bytes) -> AdminSession | None:
        row = await self._database.read(lambda: one("admin_session", digest=digest))
        if row is None:
            return None
        return AdminSession(project=None if row["key_id"] is None else _session(row), expires_at=row["expires_at"])

    async def open_in_admin_session(self, digest: bytes, *, key_id: str | None) -> None:
        await self._database.write(lambda: change("open_in_admin_session", digest=digest, key_id=key_id))

    async def close_admin_session(self, digest: bytes) -> None:
        await self._database.write(lambda: change("delete_admin_session", digest=digest))


def _session(row: Row) -> Session:
    owner = Owner(**{name: row[name] for name in _OF_OWNER})
    return Session(owner=owner, **{name: row[name] for name in _OF_SESSION})
