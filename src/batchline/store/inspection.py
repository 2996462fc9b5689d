"""Reads rows for a check of all stored data, and corrects those that disagree with what is stored."""

from collections.abc import Sequence

from msgspec import convert
from msgspec.structs import asdict

from batchline.domain.progress import LineErrors
from batchline.domain.records import Batch, InspectedFile, InspectedShard, OrganizationBooks, Segment
from batchline.domain.usage import Usage
from batchline.ports import InspectedBatch, UnsettledShard
from batchline.store.batches import lock_batch
from batchline.store.hold import JUDGED, judge_hold
from batchline.store.lanes import open_lanes
from batchline.store.shards import add_line_errors
from batchline.store.sql import Database, Row, Script, change, fenced, fenced_many, one, rows, rows_of_many


class SqlInspection:
    """The Inspection port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def inspected_ids(self, *, after: str, limit: int) -> list[str]:
        found = await self._database.read(lambda: rows("inspected_ids", after=after, limit=limit))
        return [row["id"] for row in found]

    async def inspect_batch(self, batch_id: str) -> InspectedBatch | None:
        return await self._database.read(lambda: _inspect_batch(batch_id))

    async def inspect_files(self, *, after: str, limit: int) -> list[InspectedFile]:
        found = await self._database.read(lambda: rows("inspected_files", after=after, limit=limit))
        return [_file(row) for row in found]

    async def inspect_file(self, file_id: str) -> InspectedFile | None:
        found = await self._database.read(lambda: rows_of_many("inspected_file", [{"id": file_id}]))
        return _file(found[0]) if found else None

    async def named_results(self, batch_ids: Sequence[str]) -> set[str]:
        many = [{"batch_id": batch_id} for batch_id in batch_ids]
        found = await self._database.read(lambda: rows_of_many("named_results", many))
        return {file_id for row in found for file_id in (row["output_file_id"], row["error_file_id"]) if file_id}

    async def books_of(self, organization_id: str) -> OrganizationBooks | None:
        row = await self._database.read(lambda: one("organization_books", organization_id=organization_id))
        return convert(dict(row), OrganizationBooks) if row else None

    async def set_to_ledger(self, organization_id: str) -> None:
        def script() -> Script[None]:
            yield from rows("lock_organization", organization_id=organization_id)
            yield from change("set_to_ledger", organization_id=organization_id)

        await self._database.write(script)

    async def correct_drained(self, batch_id: str) -> None:
        def script() -> Script[None]:
            yield from lock_batch(batch_id)
            yield from change("correct_drained", batch_id=batch_id)

        await self._database.write(script)

    async def correct_times(self, batch_id: str) -> None:
        await self._database.write(lambda: change("correct_times", batch_id=batch_id))

    async def close_ended_shards(self, batch_id: str) -> None:
        await self._database.write(lambda: change("close_ended_shards", batch_id=batch_id))

    async def open_missing_lanes(self, batch_id: str) -> None:
        def script() -> Script[None]:
            yield from lock_batch(batch_id)
            yield from open_lanes((yield from rows("unclaimable_shards", batch_id=batch_id)))
            yield from change("open_stray_shards", batch_id=batch_id)

        await self._database.write(script)

    async def hand_over(self, batch_id: str, shards: Sequence[UnsettledShard]) -> None:
        ordered = sorted(shards, key=lambda shard: shard.n)
        leased = [{"batch_id": batch_id, **asdict(shard)} for shard in ordered if shard.leased]
        others = [{"batch_id": batch_id, **asdict(shard)} for shard in ordered if not shard.leased]

        def script() -> Script[None]:
            yield from fenced_many("unsettle_shard", leased)
            batch = yield from lock_batch(batch_id)
            yield from fenced_many("unsettle_shard", others)
            yield from change("retry_finalize", batch_id=batch_id)
            yield from change("mark_drained", batch_id=batch_id)
            if batch is not None and batch["hold"] in JUDGED:
                yield from judge_hold(batch_id)

        await self._database.write(script)

    async def correct_counts(
        self, batch: Batch, *, completed: int, failed: int, usage: Usage, errors: Sequence[LineErrors]
    ) -> None:
        def script() -> Script[None]:
            yield from lock_batch(batch.id)
            yield from fenced(
                "correct_counts",
                batch_id=batch.id,
                completed=completed,
                failed=failed,
                output_file_id=batch.output_file_id,
                error_file_id=batch.error_file_id,
                **asdict(usage),
            )
            yield from change("delete_line_errors", batch_id=batch.id)
            yield from add_line_errors(batch.id, errors)

        await self._database.write(script)


def _inspect_batch(batch_id: str) -> Script[InspectedBatch | None]:
    row = yield from one("inspected_batch", batch_id=batch_id)
    if row is None:
        return None
    batch = convert(dict(row), Batch)
    shards = yield from rows("inspected_shards", batch_id=batch_id)
    segments = yield from rows("inspected_segments", batch_id=batch_id)
    file_ids = [
        {"id": file_id} for file_id in (batch.input_file_id, batch.output_file_id, batch.error_file_id) if file_id
    ]
    files = yield from rows_of_many("inspected_file", file_ids)
    errors = yield from rows("line_errors", batch_id=batch_id)
    booked = (yield from rows("booked_usage", key_id=batch.key_id, batch_id=batch_id))[0]
    unclaimable = yield from rows("unclaimable_shards", batch_id=batch_id)
    return InspectedBatch(
        batch=batch,
        work_key=row["work_key"],
        drained=bool(row["drained"]),
        owner=row["owner"],
        failures=row["failures"],
        repairs=row["repairs"],
        shards=[convert(dict(shard), InspectedShard) for shard in shards],
        segments=[convert(dict(segment), Segment) for segment in segments],
        files={file["id"]: _file(file) for file in files},
        failed_by_code=sum(error["count"] for error in errors),
        booked_requests=booked["requests"],
        booked_usage=convert({name: booked[name] for name in Usage.__struct_fields__}, Usage),
        unclaimable=[shard["n"] for shard in unclaimable],
    )


def _file(row: Row) -> InspectedFile:
    return convert(dict(row), InspectedFile, strict=False)
