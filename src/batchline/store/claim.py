"""Chooses the shards that a claim leases.

Shards are grouped into lanes, one per project and model. A lane has a virtual time: the number of lines that were
claimed from it. The next shard is always that of the lane with the least virtual time, so every lane gets the same
number of lines over time.
"""

from collections import deque
from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Any

from msgspec import convert

from batchline.domain.bitmap import unsettled
from batchline.domain.limits import runs_alone
from batchline.domain.records import Shard
from batchline.store.sql import Row, Script, change_many, one, rows, rows_of_many

_MAX_LANES = 16
_MAX_SHARDS = 32
"""The most shards in one claim, so that none takes long; a worker that wants more claims again."""
_SHARDS_READ_AHEAD = 8
"""The shards that are read first. Most claims take fewer, and those that take more read again."""
_MAX_ROUNDS = 16


def choose_shards(*, lines: int, space: int, alone: bool, without: str, at: int) -> Script[list[Shard]]:
    """Choose open shards until they hold ``lines`` lines or ``space`` bytes.

    Each lane advances by the lines taken from it, and is closed if nothing is left in it. If all lanes of a round turn
    out to be empty, other lanes may have shards: another round follows.
    """
    for _ in range(_MAX_ROUNDS if lines > 0 and space > 0 else 0):
        limit = min(lines, _MAX_LANES)
        lanes = [_Lane(row) for row in (yield from _free_lanes(without, limit=limit))]
        # Lanes that were not read may come right after the last of these, and must not be overtaken.
        until = max(lane.virtual_time for lane in lanes) if len(lanes) == limit else None
        yield from _read(lanes, limit=1 if until is not None else -(-_SHARDS_READ_AHEAD // max(1, len(lanes))), at=at)
        chosen = yield from _take_turns(lanes, until=until, lines=lines, space=space, alone=alone, at=at)
        yield from change_many("advance_lane", [lane.advanced() for lane in lanes if lane.lines or lane.is_empty])
        if chosen or not lanes or not all(lane.is_empty for lane in lanes):
            return chosen
    return []


class _Lane:
    """A lane that no other claim uses now, and its open shards as far as they were read."""

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
        """Whether the lane has no open shard, late ones included."""
        return not (self._open or self._late or self.has_more)

    @property
    def is_read(self) -> bool:
        """Whether the next shard is known, or that there is none."""
        return bool(self._open) or not self.has_more

    @property
    def next(self) -> Shard | None:
        """The next shard, if it was read."""
        return convert(dict(self._open[0]), Shard) if self._open else None

    @property
    def virtual_time(self) -> int:
        """The lines claimed from this lane, including those of this claim."""
        return int(self._row["virtual_time"]) + self.lines

    def turn(self, n: int) -> tuple[int, int, int]:
        """Return the sort key of lanes: the least virtual time first, then the fewest lines in this claim."""
        return self.virtual_time, self.lines, n

    def unread(self, limit: int) -> dict[str, Any]:
        """Return the parameters that read the next shards of this lane."""
        return self._row | {"limit": limit, "offset": self._read}

    def add_read(self, found: Sequence[Row], *, limit: int, at: int) -> None:
        """Add shards that were read.

        Shards past their completion window are not taken. They stay open until ``expire`` closes them, because this
        process's clock may be wrong.
        """
        self._read += len(found)
        self.has_more = len(found) == limit
        for row in found:
            (self._open if row["expires_at"] > at else self._late).append(row)

    def take(self, lines: int) -> None:
        """Take the next shard, which has so many lines left."""
        self._taken = self._open.popleft()
        self.lines += lines

    def advanced(self) -> dict[str, Any]:
        """Return the parameters of ``advance_lane``.

        No open shard of the lane comes before the first that was read and not taken.
        """
        params = self._row | {"lines": self.lines, "open": not self.is_empty}
        first = self._late[0] if self._late else self._open[0] if self._open else self._taken
        if first is None:
            return params
        return params | {
            "next_expires_at": first["expires_at"],
            "next_batch_id": first["batch_id"],
            "next_n": first["n"],
        }


def _free_lanes(without: str, *, limit: int) -> Script[list[Row]]:
    """Return lanes that no other claim has locked. If there are none, wait for one and look again."""
    lanes = yield from rows("claimable_lanes", without=without, limit=limit)
    if not lanes and (yield from one("busy_lane", without=without)):
        lanes = yield from rows("claimable_lanes", without=without, limit=limit)
    return lanes


def _read(lanes: Sequence[_Lane], *, limit: int, at: int) -> Script[None]:
    found: dict[tuple[str, str], list[Row]] = {lane.key: [] for lane in lanes}
    for row in (yield from rows_of_many("claimable_shards", [lane.unread(limit) for lane in lanes])):
        found[row["project_id"], row["model"]].append(row)
    for lane in lanes:
        lane.add_read(found[lane.key], limit=limit, at=at)


def _take_turns(
    lanes: Sequence[_Lane], *, until: int | None, lines: int, space: int, alone: bool, at: int
) -> Script[list[Shard]]:
    """Take the next shard of the first lane in turn, again and again.

    A shard that must run alone is only given to a worker that holds nothing. If its lane comes first, other workers get
    no shard after it in this claim, so that it does not starve behind new shards.
    """
    queue = [lane.turn(n) for n, lane in enumerate(lanes)]
    heapify(queue)
    chosen: list[Shard] = []
    while queue and lines > 0 and space > 0 and len(chosen) < _MAX_SHARDS:
        *_, n = heappop(queue)
        lane = lanes[n]
        if until is not None and lane.virtual_time > until:
            break
        while not lane.is_read:
            yield from _read([lane], limit=_MAX_SHARDS, at=at)
        shard = lane.next
        if shard is None:
            continue
        unsettled_lines = len(unsettled(shard.settled, shard.lines))
        if runs_alone(shard.strikes):
            if chosen:
                continue
            if not alone:
                lane.lines += unsettled_lines
                break
            lines = 0
        lane.take(unsettled_lines)
        chosen.append(shard)
        lines, space = lines - unsettled_lines, space - shard.length
        heappush(queue, lane.turn(n))
    return chosen
