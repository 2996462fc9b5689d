"""Reads the work file of a batch shard by shard, and compares the bitmaps of the shards with recorded results."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import groupby

from msgspec import DecodeError
from msgspec.json import Decoder

from batchline.domain.bitmap import all_but, unsettled
from batchline.domain.errors import Damaged
from batchline.domain.lines import Line, lines_of
from batchline.domain.records import InspectedShard
from batchline.domain.states import ShardState
from batchline.fsck.reading import ObjectReader, Unreadable
from batchline.fsck.tally import LineNumbers, LineSet, LineTally
from batchline.ports import InspectedBatch, UnsettledShard

_text = Decoder(str)


@dataclass
class WorkCheck:
    """The differences between the work file of a batch, the bitmaps of its shards, and its results."""

    lines: LineSet
    """The lines of all readable shards."""
    damaged: list[tuple[InspectedShard, str]] = field(default_factory=list)
    """Shards whose lines cannot be read, each with the reason."""
    lost: LineNumbers = field(default_factory=LineNumbers)
    """Lines that count as recorded, but have no result."""
    repeating: LineNumbers = field(default_factory=LineNumbers)
    """Lines that have a result, but do not count as recorded."""
    renamed: LineNumbers = field(default_factory=LineNumbers)
    """Lines whose result has another custom_id."""
    unsettled: list[UnsettledShard] = field(default_factory=list)
    """The shards of lost lines, without the bits of these lines."""


class WorkReader:
    """Checks the shards of a work file one at a time."""

    def __init__(self, reader: ObjectReader) -> None:
        self._reader = reader

    async def check(self, rows: InspectedBatch, tally: LineTally, *, compares_bits: bool) -> WorkCheck:
        """Compare the work file of a batch with its results, and the bitmaps too if all results could be read."""
        found = WorkCheck(LineSet(rows.batch.total))
        async for pieces, lines in self._groups(rows, found):
            for line in lines:
                found.lines.add(line.index)
                if tally.differs(line.index, _text.decode(line.custom_id)):
                    found.renamed.add(line.index)
            if compares_bits:
                _compare(pieces, lines, tally, found)
        return found

    async def _groups(
        self, rows: InspectedBatch, found: WorkCheck
    ) -> AsyncIterator[tuple[list[InspectedShard], list[Line]]]:
        """Yield the lines of each part of the work file, with its shard or the pieces that this was split into."""
        ordered = sorted(rows.shards, key=lambda shard: (shard.offset, shard.n))
        for _, group in groupby(ordered, key=lambda shard: shard.offset):
            pieces = list(group)
            try:
                yield pieces, await self._lines(rows.work_key or "", pieces)
            except Unreadable as error:
                found.damaged.append((pieces[0], str(error)))

    async def _lines(self, key: str, pieces: list[InspectedShard]) -> list[Line]:
        if not key:
            raise Unreadable("is missing: the batch has no work file")
        data = await self._reader.read(key, pieces[0].offset, pieces[0].length)
        try:
            for piece in pieces:
                lines = lines_of(piece, data)
            for line in lines:
                # A version that wrote no checksums may have written the shard, so an invalid custom_id shows only here.
                _text.decode(line.custom_id)
        except (Damaged, DecodeError, UnicodeDecodeError):
            raise Unreadable("is not what was written" if len(data) == pieces[0].length else "is cut off") from None
        return lines


def _compare(pieces: list[InspectedShard], lines: list[Line], tally: LineTally, found: WorkCheck) -> None:
    """Compare bitmaps with results. A line is recorded if its bit is set in every piece."""
    open_positions = {at for piece in pieces for at in unsettled(piece.settled, piece.lines)}
    lost = []
    for at, line in enumerate(lines):
        if at in open_positions and line.index in tally.lines:
            found.repeating.add(line.index)
        if at not in open_positions and line.index not in tally.lines:
            found.lost.add(line.index)
            lost.append(at)
    if not lost:
        return
    # A worker that holds a piece would lose it, so another piece is better.
    piece = min(pieces, key=lambda piece: (piece.state is ShardState.LEASED, piece.n))
    found.unsettled.append(
        UnsettledShard(
            n=piece.n,
            epoch=piece.epoch,
            leased=piece.state is ShardState.LEASED,
            former=piece.settled,
            settled=all_but([*unsettled(piece.settled, piece.lines), *lost], piece.lines),
        )
    )
