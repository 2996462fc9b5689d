"""Stores what the reuse of answers needs: indexes of earlier batches, and the lines that took an answer."""

from typing import Any

from msgspec import convert
from msgspec.structs import asdict

from batchline.domain.bitmap import unsettled
from batchline.domain.errors import LeaseLost
from batchline.domain.reuse import Source, StoredIndex
from batchline.domain.states import Hold, ShardState
from batchline.ports import FinalizeLease, ReuseChanges
from batchline.store.batches import lock_batch
from batchline.store.hold import JUDGED, judge_hold, withhold_all, withhold_all_but_trial
from batchline.store.lanes import open_lanes
from batchline.store.ledger import charge_account
from batchline.store.sql import Database, Row, Script, change, change_many, fenced, fenced_many, rows, rows_of_many


class SqlReuse:
    """The ReuseStore port."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def reuse_sources(self, project_id: str, *, endpoint: str, since: int, at: int, limit: int) -> list[Source]:
        found = await self._database.read(
            lambda: rows("reuse_sources", project_id=project_id, endpoint=endpoint, since=since, at=at, limit=limit)
        )
        return [convert(dict(row), Source) for row in found]

    async def add_index(self, batch_id: str, index: StoredIndex) -> bool:
        return bool(await self._database.write(lambda: change("insert_index", batch_id=batch_id, **asdict(index))))

    async def drop_index(self, batch_id: str) -> None:
        await self._database.write(lambda: change_many("delete_index", [{"batch_id": batch_id}]))

    async def end_reuse_step(self, leased: FinalizeLease, changes: ReuseChanges, *, at: int) -> bool:
        batch, lease = leased.batch, {"batch_id": leased.batch.id, "epoch": leased.epoch, "owner": leased.owner}

        def script() -> Script[bool]:
            locked = yield from lock_batch(batch.id)
            if locked is None:
                raise LeaseLost("end_reuse_step")
            sources = [{"id": file_id} for file_id in sorted(changes.sources)]
            if len((yield from rows_of_many("reusable_files", sources))) < len(sources):
                return False
            known = {row["n"]: row for row in (yield from rows("following_shards", batch_id=batch.id))}
            if locked["stop"] is not None and not known:
                # Meanwhile it was stopped, which closed all of its shards.
                yield from fenced("end_reuse_step", **lease, drained=True)
                return True
            if not known.keys() >= {part.n for part in changes.shards}:
                # Another process has taken this step meanwhile.
                raise LeaseLost("end_reuse_step")
            following = (yield from rows("next_shard_n", batch_id=batch.id))[0]["n"]
            divided = _held_back(_divide(known, changes, following=following), locked, following=following)
            opened = [shard for shard in divided if shard["state"] == ShardState.OPEN]
            waiting = any(shard["state"] in (ShardState.OPEN, ShardState.WITHHELD) for shard in divided)
            yield from fenced("end_reuse_step", **lease, drained=not waiting)
            yield from open_lanes(opened)
            changed = [shard for shard in divided if shard["n"] in known]
            yield from fenced_many("divide_shard", [_divide_params(shard) for shard in changed])
            yield from change_many("insert_shard", [shard for shard in divided if shard["n"] not in known])
            for segment in changes.segments:
                yield from change("insert_segment", batch_id=batch.id, **asdict(segment))
            if locked["hold"] in JUDGED:
                yield from judge_hold(batch.id)
            account = (yield from rows("account_of_batch", batch_id=batch.id))[0]
            yield from charge_account(
                account["organization_id"],
                key_id=account["key_id"],
                batch_id=batch.id,
                charges=changes.charges,
                at=at,
            )
            return True

        return await self._database.write(script)


def _divide(known: dict[int, Row], changes: ReuseChanges, *, following: int) -> list[dict[str, Any]]:
    """Return the shards as they are now. One with lines that still wait is split, as if its worker had died."""
    changed, added = [], []
    for part in changes.shards:
        shard = {**dict(known[part.n]), "completed": part.completed}
        if part.settled is None:
            state = ShardState.DONE if part.following is None else ShardState.FOLLOWING
            changed.append(shard | {"settled": part.following or part.done, "state": state})
            continue
        changed.append(shard | {"settled": part.settled, "state": ShardState.OPEN})
        if part.following is not None:
            added.append(shard | {"settled": part.following, "state": ShardState.FOLLOWING, "completed": 0})
    return changed + [shard | {"n": n} for n, shard in enumerate(added, following)]


def _held_back(shards: list[dict[str, Any]], batch: Row, *, following: int) -> list[dict[str, Any]]:
    """Return shards without an answer as the state of their batch wants them: it may have been stopped, or be held."""
    if batch["stop"] is not None:
        return [
            shard | {"state": ShardState.CLOSED} if shard["state"] == ShardState.OPEN else shard for shard in shards
        ]
    if batch["hold"] == Hold.TRIAL:
        return withhold_all_but_trial(shards, following=following + len(shards))
    return withhold_all(shards) if batch["held"] else shards


def _divide_params(shard: dict[str, Any]) -> dict[str, Any]:
    done = not unsettled(shard["settled"], shard["lines"])
    return {
        "batch_id": shard["batch_id"],
        "n": shard["n"],
        "settled": shard["settled"],
        "completed": shard["completed"],
        "state": ShardState.DONE if done else shard["state"],
    }
