"""Withholds the shards of a batch while it is held, or while only its trial may run, and opens them again."""

from collections.abc import Sequence
from typing import Any

from msgspec import convert

from batchline.domain.bitmap import all_but, unsettled
from batchline.domain.hold import choose_trial, judge
from batchline.domain.progress import LineErrors
from batchline.domain.states import Hold, ShardState
from batchline.store.lanes import open_lanes
from batchline.store.sql import Script, change, one, rows

JUDGED = (Hold.TRIAL, Hold.WATCHING)
"""The values of ``hold`` with which a batch is judged again whenever lines of it are recorded."""


def withhold_all_but_trial(shards: Sequence[dict[str, Any]], *, following: int) -> list[dict[str, Any]]:
    """Return the shards of a batch with only the lines of its trial open. New ones are numbered from ``following``.

    A shard with lines of the trial is split, as if its worker had died: both parts keep its range in the work file, and
    each has the lines of the other marked as settled.
    """
    opened = [shard for shard in shards if shard["state"] == ShardState.OPEN]
    divided, rest = [shard for shard in shards if shard["state"] != ShardState.OPEN], []
    lines = [unsettled(shard["settled"], shard["lines"]) for shard in opened]
    trial = choose_trial([len(positions) for positions in lines])
    for place, (shard, positions) in enumerate(zip(opened, lines, strict=True)):
        chosen = [positions[at] for at in trial.get(place, [])]
        if not chosen:
            divided.append(shard | {"state": ShardState.WITHHELD})
            continue
        divided.append(shard | {"settled": all_but(chosen, shard["lines"])})
        left = sorted(set(positions) - set(chosen))
        if left:
            part = {"settled": all_but(left, shard["lines"]), "state": ShardState.WITHHELD, "completed": 0}
            rest.append(shard | part)
    return divided + [shard | {"n": n} for n, shard in enumerate(rest, following)]


def withhold_all(shards: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the shards of a batch that is held, with none of them open."""
    return [shard | {"state": ShardState.WITHHELD} if shard["state"] == ShardState.OPEN else shard for shard in shards]


def judge_hold(batch_id: str) -> Script[None]:
    """Hold a batch, or let all of its lines run, by what is recorded of it. The caller holds the lock of the batch."""
    counts = yield from one("hold_counts", batch_id=batch_id)
    if counts is None or counts["hold"] is None:
        return
    errors = [convert(dict(row), LineErrors) for row in (yield from rows("line_errors", batch_id=batch_id))]
    before = Hold(counts["hold"])
    hold = judge(before, errors, recorded=counts["recorded"], total=counts["total"], running=bool(counts["running"]))
    if hold is before:
        return
    yield from change("set_hold", batch_id=batch_id, hold=hold)
    if hold is Hold.HELD:
        yield from change("withhold_open_shards", batch_id=batch_id)
    elif before is Hold.TRIAL:
        yield from open_withheld(batch_id)


def open_withheld(batch_id: str) -> Script[None]:
    """Let workers claim the shards of a batch that were withheld. The caller holds the lock of the batch."""
    yield from open_lanes((yield from rows("withheld_shards", batch_id=batch_id)))
    yield from change("open_withheld_shards", batch_id=batch_id)
