"""Stores where the results of batches are, and which batches run the failed lines of others again."""

from msgspec import convert

from batchline.domain.records import Batch, File, Segment, Shard
from batchline.domain.states import TERMINAL
from batchline.ports import ResultsSnapshot, Work
from batchline.store.batches import fetch_batch, with_counts
from batchline.store.sql import Database, Script, change, one, rows, rows_of_many


class SqlResults:
    """The Results port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def results(
        self, project_id: str, batch_id: str, *, after: int, limit: int, at: int
    ) -> ResultsSnapshot | None:
        def script() -> Script[ResultsSnapshot | None]:
            row = yield from one("batch", id=batch_id, project_id=project_id)
            if row is None:
                return None
            batch = yield from with_counts(row)
            if batch.status in TERMINAL:
                return (yield from _in_files(batch, at=at))
            return (yield from _in_segments(batch, after=after, limit=limit))

        return await self._database.read(script)

    async def add_order(self, batch_id: str, order: bytes) -> None:
        await self._database.write(lambda: change("insert_order", batch_id=batch_id, data=order))

    async def work_of(self, batch_id: str) -> Work | None:
        def script() -> Script[Work | None]:
            work = yield from one("work_of_batch", batch_id=batch_id)
            if work is None or work["work_key"] is None:
                return None
            shards = yield from rows("batch_shards", batch_id=batch_id)
            return Work(key=work["work_key"], shards=[convert(dict(shard), Shard) for shard in shards])

        return await self._database.read(script)

    async def lineage(self, project_id: str, batch_id: str) -> list[Batch] | None:
        def script() -> Script[list[Batch] | None]:
            if (yield from one("batch", id=batch_id, project_id=project_id)) is None:
                return None
            found: list[tuple[int, str]] = []
            parents = [batch_id]
            while parents:
                children = yield from rows_of_many("child_batches", [{"batch_id": parent} for parent in parents])
                found += [(child["seq"], child["id"]) for child in children]
                parents = [child["id"] for child in children]
            batches = []
            for each in (batch_id, *(child_id for _, child_id in sorted(found))):
                batches.append((yield from fetch_batch(each)))  # noqa: PERF401 - a comprehension cannot yield
            return batches

        return await self._database.read(script)


def _in_files(batch: Batch, *, at: int) -> Script[ResultsSnapshot]:
    files = {}
    for file_id in (batch.output_file_id, batch.error_file_id):
        row = yield from one("file", id=file_id, project_id=batch.project_id, at=at)
        if row is not None:
            files[row["id"]] = convert(dict(row), File, strict=False)
    order = yield from one("result_order", batch_id=batch.id)
    return ResultsSnapshot(batch=batch, order=None if order is None else order["data"], files=files)


def _in_segments(batch: Batch, *, after: int, limit: int) -> Script[ResultsSnapshot]:
    segments = yield from rows("segments", batch_id=batch.id, after=after, limit=limit)
    repairs = (yield from rows("work_of_batch", batch_id=batch.id))[0]["repairs"]
    emptied = (yield from rows("emptied_layouts", batch_id=batch.id)) if repairs else []
    return ResultsSnapshot(
        batch=batch,
        segments=[convert(dict(segment), Segment) for segment in segments],
        emptied=[row["layout"] for row in emptied],
    )
