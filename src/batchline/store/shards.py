"""Stores leases on shards and batches. Every write that needs a lease is fenced by the lease's epoch and owner."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from msgspec import convert
from msgspec.json import decode as decode_json
from msgspec.json import encode as encode_json
from msgspec.structs import asdict, replace

from batchline.domain.bitmap import all_but, unsettled
from batchline.domain.errors import LeaseLost
from batchline.domain.limits import STRIKES
from batchline.domain.progress import KEPT_SECONDS, LineErrors, bucket_of
from batchline.domain.records import (
    Balances,
    Batch,
    Charge,
    File,
    Lane,
    LeasedBatch,
    QueueState,
    RepairedShard,
    Segment,
    Shard,
    ShardProgress,
)
from batchline.domain.states import OPEN_STATUSES, BatchStatus, Hold, ShardState
from batchline.ports import BatchSignal, Claim, FinalizeLease, KnownBatch, RepairChanges
from batchline.store.batches import fetch_batch, lock_batch, store_answer
from batchline.store.claim import choose_shards
from batchline.store.hold import JUDGED, judge_hold, withhold_all_but_trial
from batchline.store.lanes import open_lanes
from batchline.store.ledger import charge_account, give_back
from batchline.store.sql import Database, Row, Script, change, change_many, fenced, fenced_many, one, rows, rows_of_many
from batchline.store.webhooks import queue_event

_SPLIT_PIECES = 4
"""The number of pieces that a shard is split into if its worker died. With two, a line that kills its worker would kill
twice as many workers before it is found; with more, harmless lines would run in smaller groups."""

_MAX_RESCUES = 256
"""The most shards that one transaction rescues, so that no batch stays locked for long."""

_TERMINAL_STATUS = {
    BatchStatus.FINALIZING: BatchStatus.COMPLETED,
    BatchStatus.CANCELLING: BatchStatus.CANCELLED,
    BatchStatus.IN_PROGRESS: BatchStatus.EXPIRED,
}


class SqlShards:
    """The ShardStore port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def claim(
        self, *, owner: str, lease: float, lines: int, bytes: int, alone: bool, without: Sequence[Lane] = (), at: int
    ) -> Claim:
        excluded_lanes = encode_json([_as_json_names(lane) for lane in without]).decode()

        def script() -> Script[Claim]:
            chosen = yield from choose_shards(lines=lines, space=bytes, alone=alone, without=excluded_lanes, at=at)
            shards = yield from _lease(chosen, owner=owner, lease=lease)
            batch_ids = sorted({shard.batch_id for shard in shards})
            batches = yield from rows_of_many("leased_batch", [{"batch_id": batch_id} for batch_id in batch_ids])
            return Claim(batches=[convert(dict(row), LeasedBatch, strict=False) for row in batches], shards=shards)

        return await self._database.write(script)

    async def renew_shards(self, *, owner: str, lease: float) -> set[tuple[str, int, int]]:
        renewed = await self._database.write(lambda: rows("renew_shards", owner=owner, lease=lease))
        return {(row["batch_id"], row["n"], row["epoch"]) for row in renewed}

    async def signals(self, batch_ids: Sequence[str]) -> list[BatchSignal]:
        many = [{"batch_id": batch_id} for batch_id in batch_ids]
        found = await self._database.read(lambda: rows_of_many("signals", many))
        return [convert(dict(row), BatchSignal, strict=False) for row in found]

    async def record(
        self,
        batch_id: str,
        *,
        owner: str,
        progress: Sequence[ShardProgress],
        segment: Segment,
        errors: Sequence[LineErrors] = (),
        charges: Sequence[Charge] = (),
        at: int,
    ) -> Balances:
        def script() -> Script[Balances]:
            yield from fenced_many("advance_shard", [advance_params(batch_id, owner, shard) for shard in progress])
            account = (yield from rows("record_segment", batch_id=batch_id, **asdict(segment)))[0]
            if any(shard.done for shard in progress):
                yield from change("mark_drained", batch_id=batch_id)
            yield from add_line_errors(batch_id, errors)
            yield from _add_sample(batch_id, sum(shard.completed + shard.failed for shard in progress), at=at)
            if account["hold"] in JUDGED:
                yield from judge_hold(batch_id)
            funds = yield from charge_account(
                account["organization_id"], key_id=account["key_id"], batch_id=batch_id, charges=charges, at=at
            )
            if account["max_cost"] is None:
                return Balances(funds=funds)
            cost = (yield from rows("cost_of_batch", key_id=account["key_id"], batch_id=batch_id))[0]["cost"]
            return Balances(funds=funds, cost_left=account["max_cost"] - cost)

        return await self._database.write(script)

    async def held_shards(self, batch_id: str, *, owner: str) -> list[Shard]:
        return [
            _shard(row)
            for row in await self._database.read(lambda: rows("held_shards", batch_id=batch_id, owner=owner))
        ]

    async def close_shard(self, batch_id: str, n: int, *, epoch: int, owner: str) -> None:
        def script() -> Script[None]:
            yield from change("close_shard", batch_id=batch_id, n=n, epoch=epoch, owner=owner)
            batch = yield from lock_batch(batch_id)
            if batch is None:
                return
            yield from change("mark_drained", batch_id=batch_id)
            if batch["hold"] in JUDGED:
                yield from judge_hold(batch_id)

        await self._database.write(script)

    async def release(self, batch_id: str, *, owner: str, shards: Sequence[tuple[int, int]]) -> None:
        many = [{"batch_id": batch_id, "n": n, "epoch": epoch, "owner": owner} for n, epoch in sorted(shards)]

        def script() -> Script[None]:
            yield from rows_of_many("lock_shards", many)
            batch = yield from lock_batch(batch_id)
            if batch is None:
                return
            state = _state_without_lease(batch)
            released = yield from rows_of_many("release_shard", [{**shard, "state": state} for shard in many])
            yield from open_lanes([row for row in released if row["state"] == ShardState.OPEN])
            yield from change("mark_drained", batch_id=batch_id)

        await self._database.write(script)

    async def watch_leases(self, *, owner: str, lease: float) -> None:
        await self._database.write(lambda: change("watch_leases", owner=owner, lease=lease))

    async def rescue(self, *, live_owners: Callable[[], Sequence[str]]) -> int:
        rescued = found = await self._database.write(lambda: _rescue(live_owners))
        while found == _MAX_RESCUES:
            found = await self._database.write(lambda: _rescue(live_owners))
            rescued += found
        return rescued

    async def fail_interrupted(self, *, owner: str, errors: bytes, answer: bytes, at: int) -> list[Batch]:
        def script() -> Script[list[Batch]]:
            failed = []
            for row in (yield from rows("interrupted_batches", owner=owner)):
                yield from fenced("fail_batch", batch_id=row["batch_id"], epoch=row["epoch"], errors=errors, at=at)
                yield from store_answer(row["batch_id"], status=400, body=answer)
                yield from queue_event(row["batch_id"], BatchStatus.FAILED)
                failed.append((yield from fetch_batch(row["batch_id"])))
            return failed

        return await self._database.write(script)

    async def expire(self) -> list[str]:
        def script() -> Script[list[str]]:
            # In the order in which claims lock shards.
            overdue = sorted(row["batch_id"] for row in (yield from rows("batches_past_window")))
            for batch_id in overdue:
                yield from change("stop_expired", batch_id=batch_id)
                yield from change("close_open_shards", batch_id=batch_id, follows=True)
                yield from change("mark_drained", batch_id=batch_id)
            return overdue

        return await self._database.write(script)

    async def lease_finalizable(self, *, owner: str, lease: float, at: int) -> FinalizeLease | None:
        def script() -> Script[FinalizeLease | None]:
            row = yield from one("finalizable_batch", owner=owner)
            if row is None:
                return None
            following = []
            if row["reuse"] is not None:
                following = yield from rows("following_shards", batch_id=row["id"])
            yield from fenced(
                "lease_finalizable",
                id=row["id"],
                epoch=row["epoch"],
                owner=owner,
                lease=lease,
                finalizes=not following,
                at=at,
            )
            batch = yield from fetch_batch(row["id"])
            closed = yield from rows("closed_shards", batch_id=batch.id)
            return FinalizeLease(
                batch=batch,
                epoch=batch.epoch,
                owner=owner,
                work_key=row["work_key"],
                leftovers=[_shard(shard) for shard in closed],
                following=[_shard(shard) for shard in following],
                failures=row["failures"],
                repairs=row["repairs"],
            )

        return await self._database.write(script)

    async def defer_finalize(self, leased: FinalizeLease, *, seconds: float) -> None:
        await self._database.write(lambda: fenced("defer_finalize", **_lease_of(leased), seconds=seconds))

    async def stop_failed(self, batch_id: str) -> Batch | None:
        def script() -> Script[Batch | None]:
            if (yield from one("batch", id=batch_id, project_id=None)) is None:
                return None
            if (yield from change("stop_failed", batch_id=batch_id)):
                yield from change("close_open_shards", batch_id=batch_id, follows=False)
                yield from change("mark_drained", batch_id=batch_id)
            return (yield from fetch_batch(batch_id))

        return await self._database.write(script)

    async def batch_shards(self, batch_id: str) -> list[Shard]:
        return [_shard(row) for row in await self._database.read(lambda: rows("batch_shards", batch_id=batch_id))]

    async def repair_batch(self, leased: FinalizeLease, changes: RepairChanges, *, at: int) -> None:
        batch_id = leased.batch.id
        reopened = {shard.n for shard in changes.shards if shard.state is ShardState.OPEN}

        def script() -> Script[None]:
            batch = yield from lock_batch(batch_id)
            if batch is None:
                raise LeaseLost("repair_batch")
            # The batch may have been stopped since it was leased.
            state = _state_without_lease(batch)
            shards = [replace(shard, state=state) if shard.n in reopened else shard for shard in changes.shards]
            drained = not reopened or state is ShardState.CLOSED
            yield from fenced("repair_batch", **_lease_of(leased), drained=drained)
            if state is ShardState.OPEN:
                shards = yield from _open_repaired(batch, shards)
            yield from change_many("repair_shard", [_repair_params(batch_id, shard) for shard in shards])
            for segment in changes.added:
                yield from change("insert_segment", batch_id=batch_id, **asdict(segment))
            yield from change("delete_line_errors", batch_id=batch_id)
            yield from add_line_errors(batch_id, changes.errors)
            charges = yield from rows_of_many("segment_charges", _segment_params(batch_id, changes.lost))
            yield from change_many(
                "empty_segment",
                [{"batch_id": batch_id, "id": id_, "layout": layout} for id_, layout in changes.removed.items()],
            )
            yield from give_back(
                batch_id,
                [charge for row in charges for charge in decode_json(row["charges"], type=list[Charge])],
                at=at,
            )

        await self._database.write(script)

    async def queue_state(self) -> QueueState:
        found: dict[str, Any] = {}
        for name in ("count_queued_lines", "count_open_batches", "oldest_and_nearest_batch"):
            [row] = await self._database.read(partial(rows, name))
            found |= dict(row)
        return QueueState(
            lines=found["lines"],
            open_batches={status: found[status] for status in OPEN_STATUSES},
            oldest_created_at=found["oldest_created_at"],
            nearest_expires_at=found["nearest_expires_at"],
        )

    async def segments(self, batch_id: str, *, after: int, limit: int) -> list[Segment]:
        found = await self._database.read(lambda: rows("segments", batch_id=batch_id, after=after, limit=limit))
        return [convert(dict(row), Segment) for row in found]

    async def publish(
        self,
        batch_id: str,
        *,
        epoch: int,
        owner: str,
        files: Sequence[File],
        order: bytes | None = None,
        completed: int,
        failed: int,
        errors: Sequence[LineErrors] = (),
        at: int,
    ) -> BatchStatus:
        def script() -> Script[BatchStatus]:
            yield from lock_batch(batch_id)
            batch = yield from fetch_batch(batch_id)
            if batch.status not in _TERMINAL_STATUS:
                raise LeaseLost(batch_id)
            yield from one("lock_project", project_id=batch.project_id)
            yield from change("delete_idle_lanes", batch_id=batch_id)
            for file in files:
                yield from change("insert_result", **asdict(file))
            if order is not None:
                yield from change("insert_order", batch_id=batch_id, data=order)
            yield from add_line_errors(batch_id, errors)
            yield from fenced(
                "publish_batch",
                batch_id=batch_id,
                epoch=epoch,
                owner=owner,
                status=_TERMINAL_STATUS[batch.status],
                completed=completed,
                failed=failed,
                **asdict(batch.usage),
                output_file_id=next((file.id for file in files if not file.is_error), None),
                error_file_id=next((file.id for file in files if file.is_error), None),
                at=at,
            )
            yield from queue_event(batch_id, _TERMINAL_STATUS[batch.status])
            return _TERMINAL_STATUS[batch.status]

        return await self._database.write(script)

    async def prunable(self, *, retention: int, without: Collection[str] = (), limit: int) -> list[str]:
        left_out = encode_json(sorted(without)).decode()
        found = await self._database.read(
            lambda: rows("prunable_batches", retention=retention, without=left_out, limit=limit)
        )
        return [row["batch_id"] for row in found]

    async def delete_work(self, batch_id: str) -> None:
        def script() -> Script[None]:
            yield from change("delete_shards", batch_id=batch_id)
            yield from change("delete_segments", batch_id=batch_id)
            yield from change("delete_samples", batch_id=batch_id)
            yield from change("clear_work_key", batch_id=batch_id)

        await self._database.write(script)

    async def known_batches(self, batch_ids: Sequence[str]) -> dict[str, KnownBatch]:
        many = [{"batch_id": batch_id} for batch_id in batch_ids]
        found = await self._database.read(lambda: rows_of_many("known_batches", many))
        return {row["id"]: convert(dict(row), KnownBatch, strict=False) for row in found}


def _as_json_names(lane: Lane) -> Lane:
    """Return a lane as a statement can find it by JSON: by its model, or by its project alone.

    Clients name models with any characters. PostgreSQL refuses NUL in JSON, SQLite ends a text there, and PostgreSQL's
    tables have control characters in another form. A project that uses such a name waits with its other models too.
    """
    has_control_characters = lane.model is not None and min(lane.model, default=" ") < " "
    return replace(lane, model=None) if has_control_characters else lane


def _lease(chosen: Sequence[Shard], *, owner: str, lease: float) -> Script[list[Shard]]:
    """Lease the chosen shards, except those that were closed since they were read."""
    wanted = sorted((shard.batch_id, shard.n, shard.epoch) for shard in chosen)
    leased = yield from rows_of_many(
        "lease_shard",
        [
            {"batch_id": batch_id, "n": n, "epoch": epoch, "owner": owner, "lease": lease}
            for batch_id, n, epoch in wanted
        ],
    )
    epochs = {(row["batch_id"], row["n"]): row["epoch"] for row in leased}
    return [
        replace(shard, epoch=epochs[shard.batch_id, shard.n]) for shard in chosen if (shard.batch_id, shard.n) in epochs
    ]


def advance_params(batch_id: str, owner: str, shard: ShardProgress) -> dict[str, Any]:
    """Return the parameters of ``advance_shard``."""
    return {"batch_id": batch_id, "owner": owner, **asdict(shard), **asdict(shard.usage)}


def _lease_of(leased: FinalizeLease) -> dict[str, Any]:
    return {"batch_id": leased.batch.id, "epoch": leased.epoch, "owner": leased.owner}


def _repair_params(batch_id: str, shard: RepairedShard) -> dict[str, Any]:
    return {"batch_id": batch_id, **asdict(shard), **asdict(shard.usage)}


def _open_repaired(batch: Row, shards: Sequence[RepairedShard]) -> Script[list[RepairedShard]]:
    """Open the lanes of the shards that run again, and return the shards.

    If a batch runs its trial, only lines of that are open, and the others are withheld, in new shards where necessary.
    """
    known = {row["n"]: row for row in (yield from rows("batch_shards", batch_id=batch["id"]))}
    opened = [
        {**dict(known[shard.n]), "settled": shard.settled, "state": shard.state}
        for shard in shards
        if shard.n in known and shard.state is ShardState.OPEN
    ]
    if batch["hold"] == Hold.TRIAL:
        following = (yield from rows("next_shard_n", batch_id=batch["id"]))[0]["n"]
        opened = withhold_all_but_trial(opened, following=following)
    yield from open_lanes([row for row in opened if row["state"] == ShardState.OPEN])
    yield from change_many("insert_shard", [row for row in opened if row["n"] not in known])
    changed = {row["n"]: row for row in opened}
    return [
        replace(shard, settled=changed[shard.n]["settled"], state=changed[shard.n]["state"])
        if shard.n in changed
        else shard
        for shard in shards
    ]


def _segment_params(batch_id: str, segment_ids: Sequence[int]) -> list[dict[str, Any]]:
    return [{"batch_id": batch_id, "id": segment_id} for segment_id in segment_ids]


def add_line_errors(batch_id: str, errors: Sequence[LineErrors]) -> Script[None]:
    """Add to the errors of a batch by code."""
    by_code: dict[str, LineErrors] = {}
    for each in errors:
        first = by_code.get(each.code)
        by_code[each.code] = each if first is None else replace(first, count=first.count + each.count)
    yield from change_many(
        "add_line_errors", [{"batch_id": batch_id, **asdict(by_code[code])} for code in sorted(by_code)]
    )


def _add_sample(batch_id: str, lines: int, *, at: int) -> Script[None]:
    bucket = bucket_of(at)
    yield from change("add_sample", batch_id=batch_id, at=bucket, lines=lines)
    yield from change("delete_old_samples", batch_id=batch_id, until=bucket - KEPT_SECONDS)


def _rescue(live_owners: Callable[[], Sequence[str]]) -> Script[int]:
    expired = yield from rows("expired_leases", live_owners=encode_json(live_owners()).decode(), limit=_MAX_RESCUES)
    batch_ids = sorted({row["batch_id"] for row in expired})
    batches = yield from rows_of_many("lock_batch", [{"batch_id": batch_id} for batch_id in batch_ids])
    states = {batch["id"]: _state_without_lease(batch) for batch in batches}
    for row in expired:
        yield from _rescue_shard(row, state=states[row["batch_id"]])
    yield from open_lanes([row for row in expired if states[row["batch_id"]] is ShardState.OPEN])
    for batch_id in batch_ids:
        yield from change("mark_drained", batch_id=batch_id)
    for batch in batches:
        if batch["hold"] in JUDGED:
            yield from judge_hold(batch["id"])
    return len(expired)


def _state_without_lease(batch: Row) -> ShardState:
    """Return the state of a shard of a batch that loses its lease before it is done."""
    if batch["stop"] is not None:
        return ShardState.CLOSED
    return ShardState.WITHHELD if batch["held"] else ShardState.OPEN


def _rescue_shard(row: Row, *, state: ShardState) -> Script[None]:
    left = unsettled(row["settled"], row["lines"])
    if state is ShardState.CLOSED:
        yield from _reopen(row, state=state, strikes=row["strikes"], left=left)
    elif len(left) == 1:
        strikes = row["strikes"] + 1
        state = ShardState.CLOSED if strikes >= STRIKES else state
        yield from _reopen(row, state=state, strikes=strikes, left=left)
    else:
        yield from _split_shard(row, left, state=state)


def _split_shard(row: Row, left: list[int], *, state: ShardState) -> Script[None]:
    """Split a shard into pieces.

    All pieces keep the shard's range in the work file; each has the lines of the others marked as settled. However many
    strikes they get, a line is only closed once it is the last of its shard.
    """
    strikes = min(row["strikes"] + 1, STRIKES - 1)
    size = -(-len(left) // _SPLIT_PIECES)
    pieces = [left[at : at + size] for at in range(0, len(left), size)]
    yield from _reopen(row, state=state, strikes=strikes, left=pieces[0])
    following = (yield from rows("next_shard_n", batch_id=row["batch_id"]))[0]["n"]
    yield from change_many(
        "insert_shard",
        [
            {**dict(row), "n": n, "settled": all_but(piece, row["lines"]), "strikes": strikes, "state": state}
            for n, piece in enumerate(pieces[1:], following)
        ],
    )


def _reopen(row: Row, *, state: ShardState, strikes: int, left: list[int]) -> Script[None]:
    yield from fenced(
        "reopen_shard",
        batch_id=row["batch_id"],
        n=row["n"],
        epoch=row["epoch"],
        state=state,
        strikes=strikes,
        settled=all_but(left, row["lines"]),
    )


def _shard(row: Row) -> Shard:
    return convert(dict(row), Shard)
