"""Stores batches as their owners see them: creates with their answers, pages, cancellation."""

from collections.abc import Sequence
from typing import Any

from msgspec import convert
from msgspec.json import encode as encode_json

from batchline.domain.errors import InvalidCredentials, LeaseLost
from batchline.domain.progress import LineErrors, ProgressSample
from batchline.domain.records import Batch, Bill, NewShard
from batchline.domain.states import BatchStatus, Hold, ShardState
from batchline.domain.wire import BatchObject
from batchline.ports import BatchSnapshot, CreateRecord, NewBatch
from batchline.store.hold import open_withheld, withhold_all_but_trial
from batchline.store.lanes import open_lanes
from batchline.store.sql import Database, Row, Script, change, change_many, fenced, one, rows, rows_of_many
from batchline.store.webhooks import queue_event

_COUNTED_BY_SHARDS = frozenset({BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING})
"""The states in which the counts of a batch are the sums over its shards."""

_BEFORE_ALL = -(1 << 63)
_LAST = ((1 << 63) - 1, 0)
"""A time before that of all batches, and a position after all of them. A page always has both bounds, so that the index
finds it wherever it begins."""


class SqlBatches:
    """The Batches port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def begin_batch(self, new: NewBatch, *, owner: str, lease: float, since: int) -> CreateRecord | None:
        batch, key = new.batch, new.idempotency_key

        def script() -> Script[CreateRecord | None]:
            project = yield from one("lock_project", project_id=batch.project_id)
            if project is not None and project["deleted_at"] is not None:
                raise InvalidCredentials
            if key is not None:
                earlier = yield from _find_create(batch.project_id, key, since=since)
                if earlier is not None:
                    return earlier
                yield from change("clear_idempotency_key", project_id=batch.project_id, idempotency_key=key)
            yield from change(
                "insert_batch",
                id=batch.id,
                project_id=batch.project_id,
                key_id=batch.key_id,
                endpoint=batch.endpoint,
                input_file_id=batch.input_file_id,
                metadata=batch.metadata,
                created_at=batch.created_at,
                expires_at=batch.expires_at,
                epoch=batch.epoch,
                owner=owner,
                lease=lease,
                digest=new.digest,
                idempotency_key=key,
                parent_batch_id=batch.parent_batch_id,
                hold=batch.hold,
                output_lifetime=batch.output_lifetime,
                max_cost=batch.max_cost,
                reuse=batch.reuse,
            )
            return None

        return await self._database.write(script)

    async def find_create(self, project_id: str, idempotency_key: str, *, since: int) -> CreateRecord | None:
        return await self._database.read(lambda: _find_create(project_id, idempotency_key, since=since))

    async def find_unanswered_create(self, *, key_id: str, digest: bytes, since: int) -> CreateRecord | None:
        row = await self._database.read(lambda: one("newest_create", key_id=key_id, digest=digest, since=since))
        return _create_record(row) if row and not row["answered"] else None

    async def create_record(self, batch_id: str) -> CreateRecord | None:
        row = await self._database.read(lambda: one("create_record", batch_id=batch_id))
        return _create_record(row) if row else None

    async def mark_answered(self, batch_id: str) -> None:
        await self._database.write(lambda: change("mark_answered", batch_id=batch_id))

    async def renew_batch(self, batch_id: str, *, epoch: int, owner: str, lease: float) -> None:
        await self._database.write(
            lambda: fenced("renew_batch", batch_id=batch_id, epoch=epoch, owner=owner, lease=lease)
        )

    async def start_batch(
        self,
        batch_id: str,
        *,
        epoch: int,
        shards: Sequence[NewShard],
        total: int,
        work_key: str,
        sent_as: bytes | None = None,
        at: int,
    ) -> CreateRecord:
        def script() -> Script[CreateRecord]:
            started = yield from change(
                "start_batch",
                batch_id=batch_id,
                epoch=epoch,
                total=total,
                model=_only_model(shards),
                work_key=work_key,
                sent_as=sent_as,
                at=at,
            )
            if not started:
                raise LeaseLost(batch_id)
            batch = yield from fetch_batch(batch_id)
            inserted = [_new_shard(batch, n, shard) for n, shard in enumerate(shards)]
            if batch.reuse is not None:
                inserted = [shard | {"state": ShardState.FOLLOWING} for shard in inserted]
            elif batch.hold is not None:
                inserted = withhold_all_but_trial(inserted, following=len(inserted))
            yield from open_lanes([shard for shard in inserted if shard["state"] == ShardState.OPEN])
            yield from change_many("insert_shard", inserted)
            if batch.reuse is not None:
                yield from change("mark_drained", batch_id=batch_id)
            return (yield from _store_batch_as_answer(batch))

        return await self._database.write(script)

    async def fail_batch(self, batch_id: str, *, epoch: int, errors: bytes, answer: bytes, at: int) -> CreateRecord:
        def script() -> Script[CreateRecord]:
            failed = yield from change("fail_batch", batch_id=batch_id, epoch=epoch, errors=errors, at=at)
            if not failed:
                raise LeaseLost(batch_id)
            yield from queue_event(batch_id, BatchStatus.FAILED)
            return (yield from store_answer(batch_id, status=400, body=answer))

        return await self._database.write(script)

    async def drop_batch(self, batch_id: str, *, epoch: int) -> None:
        await self._database.write(lambda: change("drop_batch", batch_id=batch_id, epoch=epoch))

    async def batch(self, project_id: str, batch_id: str) -> Batch | None:
        def script() -> Script[Batch | None]:
            row = yield from one("batch", project_id=project_id, id=batch_id)
            return (yield from with_counts(row)) if row else None

        return await self._database.read(script)

    async def snapshot(self, project_id: str, batch_id: str) -> BatchSnapshot | None:
        def script() -> Script[BatchSnapshot | None]:
            row = yield from one("batch", project_id=project_id, id=batch_id)
            if row is None:
                return None
            models = yield from rows("unfinished_models", batch_id=batch_id)
            errors = yield from rows("line_errors", batch_id=batch_id)
            samples = yield from rows("samples", batch_id=batch_id)
            children = yield from rows_of_many("child_batches", [{"batch_id": batch_id}])
            bill = yield from rows("cost_of_batch", key_id=row["key_id"], batch_id=batch_id)
            return BatchSnapshot(
                batch=(yield from with_counts(row)),
                models=[found["model"] for found in models],
                errors=[convert(dict(found), LineErrors) for found in errors],
                samples=[convert(dict(found), ProgressSample) for found in samples],
                child_batch_ids=[found["id"] for found in children],
                bill=convert(dict(bill[0]), Bill),
            )

        return await self._database.read(script)

    async def batches(
        self,
        project_id: str,
        *,
        after: str | None,
        limit: int,
        status: str | None = None,
        created_after: int | None = None,
        created_before: int | None = None,
        model: str | None = None,
        text: str | None = None,
    ) -> list[Batch] | None:
        def script() -> Script[list[Batch] | None]:
            before = _LAST if created_before is None else (created_before, 0)
            if after is not None:
                cursor = yield from one("batch_position", project_id=project_id, id=after)
                if cursor is None:
                    return None
                before = min(before, (cursor["created_at"], cursor["seq"]))
            bounds = {
                "project_id": project_id,
                "created_after": _BEFORE_ALL if created_after is None else created_after,
                "before_created_at": before[0],
                "before_seq": before[1],
                "limit": limit,
            }
            if model is not None or text is not None or status == Hold.HELD:
                page = yield from rows("search_batches", status=status, model=model, text=text, **bounds)
            elif status is None:
                page = yield from rows("batches", **bounds)
            else:
                page = yield from rows("batches_of_status", status=status, **bounds)
            batches = []
            for row in page:
                batches.append((yield from with_counts(row)))  # noqa: PERF401 - a comprehension cannot yield
            return batches

        return await self._database.read(script)

    async def open_batches(self, *, limit: int) -> list[Batch]:
        def script() -> Script[list[Batch]]:
            batches = []
            for row in (yield from rows("open_batches", limit=limit)):
                batches.append((yield from with_counts(row)))  # noqa: PERF401 - a comprehension cannot yield
            return batches

        return await self._database.read(script)

    async def cancel_batch(self, project_id: str, batch_id: str, *, at: int) -> tuple[Batch, bool] | None:
        def script() -> Script[tuple[Batch, bool] | None]:
            row = yield from one("batch", project_id=project_id, id=batch_id)
            if row is None:
                return None
            ended = yield from change("cancel_validating", id=batch_id, at=at)
            if ended:
                yield from _store_batch_as_answer((yield from fetch_batch(batch_id)))
                yield from queue_event(batch_id, BatchStatus.CANCELLED)
            if (yield from change("cancel_running", id=batch_id, at=at)):
                yield from change("close_open_shards", batch_id=batch_id, follows=True)
                yield from change("mark_drained", batch_id=batch_id)
            return (yield from fetch_batch(batch_id)), bool(ended)

        return await self._database.write(script)

    async def model_rates(self, project_id: str, model: str, *, since: int, limit: int) -> list[float]:
        found = await self._database.read(
            lambda: rows("model_rates", project_id=project_id, model=model, since=since, limit=limit)
        )
        return [row["lines"] / max(1, row["seconds"]) for row in found]

    async def release_batch(self, project_id: str, batch_id: str) -> tuple[Batch, bool] | None:
        def script() -> Script[tuple[Batch, bool] | None]:
            if (yield from one("batch", project_id=project_id, id=batch_id)) is None:
                return None
            released = yield from change("release_hold", batch_id=batch_id)
            if released:
                yield from open_withheld(batch_id)
            return (yield from fetch_batch(batch_id)), bool(released)

        return await self._database.write(script)


def _find_create(project_id: str, idempotency_key: str, *, since: int) -> Script[CreateRecord | None]:
    row = yield from one("create_by_idempotency_key", project_id=project_id, idempotency_key=idempotency_key)
    return _create_record(row) if row and row["created_at"] > since else None


def fetch_batch(batch_id: str) -> Script[Batch]:
    """Return a batch with its current counts. Raise LeaseLost if it does not exist."""
    row = yield from one("batch", id=batch_id, project_id=None)
    if row is None:
        raise LeaseLost(batch_id)
    return (yield from with_counts(row))


def lock_batch(batch_id: str) -> Script[Row | None]:
    """Lock a batch, and return what its shards depend on. Return None if the database has lost the batch."""
    found = yield from rows_of_many("lock_batch", [{"batch_id": batch_id}])
    return found[0] if found else None


def store_answer(batch_id: str, *, status: int, body: bytes) -> Script[CreateRecord]:
    """Store the answer to a create, so that it can be sent again byte for byte."""
    yield from change("store_answer", batch_id=batch_id, status=status, body=body)
    row = yield from one("create_record", batch_id=batch_id)
    return _create_record(row or {})


def _store_batch_as_answer(batch: Batch) -> Script[CreateRecord]:
    return (yield from store_answer(batch.id, status=200, body=encode_json(BatchObject.from_record(batch))))


def _only_model(shards: Sequence[NewShard]) -> str | None:
    """Return the model of all lines, or None if there are several or the lines name none."""
    models = {shard.model for shard in shards}
    return models.pop() or None if len(models) == 1 else None


def _new_shard(batch: Batch, n: int, shard: NewShard) -> dict[str, Any]:
    return {
        "batch_id": batch.id,
        "n": n,
        "project_id": batch.project_id,
        "offset": shard.offset,
        "length": shard.length,
        "lines": shard.lines,
        "model": shard.model,
        "expires_at": batch.expires_at,
        "settled": bytes((shard.lines + 7) // 8),
        "strikes": 0,
        "checksum": shard.checksum,
        "state": ShardState.OPEN,
    }


def _create_record(row: Row) -> CreateRecord:
    return CreateRecord(
        batch_id=row["batch_id"],
        digest=row["digest"],
        answer_status=row["answer_status"],
        answer_body=row["answer_body"],
    )


def with_counts(row: Row) -> Script[Batch]:
    """Return a batch with its current counts."""
    counts: Row = {}
    if row["status"] in _COUNTED_BY_SHARDS:
        counts = (yield from rows("live_counts", batch_id=row["id"]))[0]
    return convert(dict(row) | dict(counts), Batch)
