"""Which shards a claim takes: one after the other, always the next of the lane that had least so far."""

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from msgspec import convert

from batchline.domain.bitmap import unsettled
from batchline.domain.limits import runs_alone
from batchline.domain.records import Shard
from batchline.store.sql import Row, Script, change_many, one, rows, rows_of_many

_MOST_LANES = 16
_MOST_SHARDS = 32
"""In one claim, so that none takes long; whoever wants more claims again."""
_MOST_LOOKS = 16


def choose(*, lines: int, space: int, alone: bool, without: str, at: int) -> Script[list[Shard]]:
    """Open shards until they have so many lines or bytes. Lanes are moved on by what was taken, and closed where
    nothing is left; where they all had nothing, others may have."""
    for _ in range(_MOST_LOOKS if lines > 0 and space > 0 else 0):
        limit = min(lines, _MOST_LANES)
        lanes = [_Lane(row) for row in (yield from _free_lanes(without, limit=limit))]
        # Lanes that were not looked at may be next to the last of these, and shall not be passed by.
        until = max(lane.virtual_time for lane in lanes) if len(lanes) == limit else None
        yield from _read(lanes, limit=1 if until is not None else -(-_MOST_SHARDS // max(1, len(lanes))), at=at)
        chosen = yield from _take_turns(lanes, until=until, lines=lines, space=space, alone=alone, at=at)
        yield from change_many("advance_lane", [lane.moved() for lane in lanes if lane.lines or lane.is_empty])
        if chosen or not lanes or not all(lane.is_empty for lane in lanes):
            return chosen
    return []


class _Lane:
    """A lane that nobody else claims from now, and what is open in it as far as it was read."""

    def __init__(self, row: Row) -> None:
        self._row = dict(row)
        self.key: tuple[str, str] = (row["project_id"], row["model"])
        self.lines = 0
        self.has_more = True
        self._open: deque[Row] = deque()
        self._late: deque[Row] = deque()
        self._taken: Row | None = None
        self._read = 0

    @property
    def is_empty(self) -> bool:
        return not (self._open or self._late or self.has_more)

    @property
    def is_read(self) -> bool:
        """What comes next is known, or that nothing does."""
        return bool(self._open) or not self.has_more

    @property
    def next(self) -> Shard | None:
        return convert(dict(self._open[0]), Shard) if self._open else None

    @property
    def virtual_time(self) -> int:
        return int(self._row["virtual_time"]) + self.lines

    def turn(self, n: int) -> tuple[int, int, int]:
        """What decides who is next; of equals, who got nothing in this claim yet."""
        return self.virtual_time, self.lines, n

    def unread(self, limit: int) -> dict[str, Any]:
        return self._row | {"limit": limit, "offset": self._read}

    def take_in(self, found: Sequence[Row], *, limit: int, at: int) -> None:
        """Shards past their window wait to be closed by somebody whose clock may be better."""
        self._read += len(found)
        self.has_more = len(found) == limit
        for row in found:
            (self._open if row["expires_at"] > at else self._late).append(row)

    def take(self, lines: int) -> None:
        self._taken = self._open.popleft()
        self.lines += lines

    def moved(self) -> dict[str, Any]:
        """Nothing that is open stands before the first that was read and not taken."""
        moved = self._row | {"lines": self.lines, "open": not self.is_empty}
        first = self._late[0] if self._late else self._open[0] if self._open else self._taken
        if first is None:
            return moved
        return moved | {
            "next_expires_at": first["expires_at"],
            "next_batch_id": first["batch_id"],
            "next_n": first["n"],
        }


def _free_lanes(without: str, *, limit: int) -> Script[list[Row]]:
    """Those that nobody else is claiming from; where there are none, those that are free once others are done."""
    lanes = yield from rows("claimable_lanes", without=without, limit=limit)
    if not lanes and (yield from one("busy_lane", without=without)):
        lanes = yield from rows("claimable_lanes", without=without, limit=limit)
    return lanes


def _read(lanes: Sequence[_Lane], *, limit: int, at: int) -> Script[None]:
    found: dict[tuple[str, str], list[Row]] = {lane.key: [] for lane in lanes}
    for row in (yield from rows_of_many("claimable_shards", [lane.unread(limit) for lane in lanes])):
        found[row["project_id"], row["model"]].append(row)
    for lane in lanes:
        lane.take_in(found[lane.key], limit=limit, at=at)


def _take_turns(
    lanes: Sequence[_Lane], *, until: int | None, lines: int, space: int, alone: bool, at: int
) -> Script[list[Shard]]:
    """A shard that must run alone is given to a worker that holds nothing; that the others wait for it when its lane
    comes first keeps it from starving behind fresh work."""
    queue = [lane.turn(n) for n, lane in enumerate(lanes)]
    heapify(queue)
    chosen: list[Shard] = []
    while queue and lines > 0 and space > 0 and len(chosen) < _MOST_SHARDS:
        *_, n = heappop(queue)
        lane = lanes[n]
        if until is not None and lane.virtual_time > until:
            break
        while not lane.is_read:
            yield from _read([lane], limit=_MOST_SHARDS, at=at)
        shard = lane.next
        if shard is None:
            continue
        left = len(unsettled(shard.settled, shard.lines))
        if runs_alone(shard.strikes):
            if chosen:
                continue
            if not alone:
                lane.lines += left
                break
            lines = 0
        lane.take(left)
        chosen.append(shard)
        lines, space = lines - left, space - shard.length
        heappush(queue, lane.turn(n))
    return chosen
