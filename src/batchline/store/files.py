"""Stores files: uploads, which have a lease until they are whole, and results."""

from collections.abc import Sequence
from typing import Any

from msgspec import convert
from msgspec.structs import asdict

from batchline.domain.errors import LeaseLost
from batchline.domain.records import File
from batchline.store.sql import Database, Row, Script, change, change_many, fenced, one, rows, rows_of_many

_AFTER_ALL = (1 << 63) - 1
"""A ``seq`` that is greater than that of every file."""


class SqlFiles:
    """The Files port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin_upload(self, file: File, *, owner: str, lease: float) -> None:
        await self._database.write(lambda: change("insert_upload", owner=owner, lease=lease, **asdict(file)))

    async def renew_upload(self, file_id: str, *, owner: str, lease: float) -> None:
        await self._database.write(lambda: fenced("renew_upload", id=file_id, owner=owner, lease=lease))

    async def finish_upload(self, file: File, *, owner: str) -> None:
        def script() -> Script[None]:
            project = yield from one("lock_project", project_id=file.project_id)
            if project is not None and project["deleted_at"] is not None:
                raise LeaseLost("finish_upload")
            yield from fenced("finish_upload", owner=owner, **asdict(file))

        await self._database.write(script)

    async def abandon_upload(self, file_id: str, *, owner: str) -> None:
        await self._database.write(lambda: change("abandon_upload", id=file_id, owner=owner))

    async def file(self, project_id: str, file_id: str, *, at: int) -> File | None:
        row = await self._database.read(lambda: one("file", project_id=project_id, id=file_id, at=at))
        return _file(row) if row else None

    async def files(
        self, project_id: str, *, purpose: str | None, ascending: bool, after: str | None, limit: int, at: int
    ) -> list[File] | None:
        order = "oldest_first" if ascending else "newest_first"

        def script() -> Script[list[File] | None]:
            seq = 0 if ascending else _AFTER_ALL
            if after is not None:
                cursor = yield from one("file_seq", project_id=project_id, id=after)
                if cursor is None:
                    return None
                seq = cursor["seq"]
            bounds: dict[str, Any] = {"project_id": project_id, "after": seq, "limit": limit, "at": at}
            if purpose is None:
                page = yield from rows(f"files_{order}", **bounds)
            else:
                page = yield from rows(f"files_of_purpose_{order}", purpose=purpose, **bounds)
            return [_file(row) for row in page]

        return await self._database.read(script)

    async def stored_bytes(self, project_id: str) -> int:
        row = await self._database.read(lambda: one("stored_bytes", project_id=project_id))
        return int(row["bytes"]) if row else 0

    async def stored_bytes_of_organization(self, organization_id: str) -> int:
        row = await self._database.read(lambda: one("stored_bytes_of_organization", organization_id=organization_id))
        return int(row["bytes"]) if row else 0

    async def delete_file(self, project_id: str, file_id: str, *, at: int) -> File | None:
        def script() -> Script[File | None]:
            row = yield from one("delete_file", project_id=project_id, id=file_id, at=at)
            if row is None:
                return None
            for batch_id in _batches_of([row]):
                yield from change_many("delete_index", [{"batch_id": batch_id}])
                yield from _delete_unused_order(project_id, batch_id, at=at)
            return _file(row)

        return await self._database.write(script)

    async def expire_files(self, *, owner: str, limit: int) -> list[str]:
        def script() -> Script[list[str]]:
            expired = yield from rows("expire_files", limit=limit)
            results = [{"batch_id": batch_id} for batch_id in _batches_of(expired)]
            yield from change_many("delete_order", results)
            yield from change_many("delete_index", results)
            abandoned = yield from rows("abandon_dead_uploads", owner=owner)
            return [row["object_key"] for row in (*expired, *abandoned)]

        return await self._database.write(script)

    async def referenced_keys(self, object_keys: Sequence[str]) -> set[str]:
        many = [{"object_key": object_key} for object_key in object_keys]
        found = await self._database.read(lambda: rows_of_many("referenced_keys", many))
        return {row["object_key"] for row in found}

    async def known_keys(self, object_keys: Sequence[str]) -> set[str]:
        many = [{"object_key": object_key} for object_key in object_keys]
        found = await self._database.read(lambda: rows_of_many("known_keys", many))
        return {row["object_key"] for row in found}


def _delete_unused_order(project_id: str, batch_id: str, *, at: int) -> Script[None]:
    """Delete the order of result files unless one of the files can still be read."""
    order = yield from one("lock_order", batch_id=batch_id)
    if order is None:
        return
    for file_id in (order["output_file_id"], order["error_file_id"]):
        if (yield from one("file", project_id=project_id, id=file_id, at=at)) is not None:
            return
    yield from change_many("delete_order", [{"batch_id": batch_id}])


def _file(row: Row) -> File:
    return convert(dict(row), File, strict=False)


def _batches_of(expired: Sequence[Row]) -> list[str]:
    """Return the batches that files are results of."""
    keys = [row["object_key"].split("/") for row in expired]
    return sorted({batch_id for folder, batch_id, *_ in keys if folder == "results"})
