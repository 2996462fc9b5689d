"""Opens the lanes of shards, so that claims find them."""

from collections.abc import Sequence

from batchline.store.sql import Row, Script, change_many, one, rows


def open_lanes(shards: Sequence[Row]) -> Script[None]:
    """Open the lanes of the shards that this transaction opens, so that claims find them."""
    first: dict[tuple[str, str], tuple[int, str, int]] = {}
    for shard in shards:
        lane, position = (shard["project_id"], shard["model"]), (shard["expires_at"], shard["batch_id"], shard["n"])
        first[lane] = min(position, first.get(lane, position))
    if not first:
        return
    for project_id in sorted({project_id for project_id, _ in first}):
        yield from one("lock_lanes", project_id=project_id)
    start = (yield from rows("lane_start"))[0]["virtual_time"]
    yield from change_many(
        "open_lane",
        [
            {
                "project_id": project_id,
                "model": model,
                "virtual_time": start,
                "expires_at": expires_at,
                "batch_id": batch_id,
                "n": n,
            }
            for (project_id, model), (expires_at, batch_id, n) in sorted(first.items())
        ],
    )
