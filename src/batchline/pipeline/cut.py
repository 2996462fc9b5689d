"""Cutting a work file into shards: lines of one model side by side, grouped in a single pass without a sort."""

import os
from array import array
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import BinaryIO

from msgspec import Raw
from msgspec.json import Decoder

from batchline.domain.limits import ShardLimits
from batchline.domain.records import NewShard

MAX_OPEN_BLOCKS = 64
MAX_BUFFERED_BYTES = 16 * 1024 * 1024
MAX_MODEL_CHARACTERS = 256

_read_text = Decoder(str).decode


def grouping_key(body: Mapping[str, Raw]) -> str:
    """What lines must share to stand in one shard: the model they name, or nothing.

    A name that no model has would be kept once a shard, and a file can hold 200 MB of such names: those lines are
    grouped as if they named none. Their bodies keep it.
    """
    model = body.get("model")
    if model is None or memoryview(model)[0] != ord('"'):
        return ""
    name = _read_text(model)
    return name if len(name) <= MAX_MODEL_CHARACTERS else ""


class _Block:
    """Lines of one key that will stand side by side in the work file."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.size = 0

    def append(self, record: bytes) -> None:
        self.records.append(record)
        self.size += len(record)


class Cutter:
    """Writes a work file block by block; the shards are cut at the end, when the number of lines is known."""

    def __init__(self, out: BinaryIO, limits: ShardLimits) -> None:
        self._out = out
        self._limits = limits
        self._open: dict[str, _Block] = {}
        self._buffered = 0
        self._written = 0
        self._starts = array("Q")
        self._closed: list[tuple[str, int]] = []

    def add(self, key: str, record: bytes) -> None:
        self._make_room(key, len(record))
        block = self._open.get(key)
        if block is None:
            block = self._open[key] = _Block()
        block.append(record)
        self._buffered += len(record)
        if len(block.records) >= self._limits.max_lines:
            self._close(key)

    def finish(self) -> list[NewShard]:
        """Make the work file durable; its shards, in the file's order."""
        for key in list(self._open):
            self._close(key)
        self._out.flush()
        os.fsync(self._out.fileno())
        return list(self._shards())

    def _make_room(self, key: str, size: int) -> None:
        block = self._open.get(key)
        if block is not None and block.size + size > self._limits.max_bytes:
            self._close(key)
        if key not in self._open and len(self._open) >= MAX_OPEN_BLOCKS:
            self._close_fullest()
        while self._open and self._buffered + size > MAX_BUFFERED_BYTES:
            self._close_fullest()

    def _close_fullest(self) -> None:
        self._close(max(self._open, key=lambda key: self._open[key].size))

    def _close(self, key: str) -> None:
        block = self._open.pop(key)
        for record in block.records:
            self._out.write(record)
            self._starts.append(self._written)
            self._written += len(record)
        self._buffered -= block.size
        self._closed.append((key, len(block.records)))

    def _shards(self) -> Iterator[NewShard]:
        longest = self._limits.lines_for(len(self._starts))
        bounds = [*self._starts, self._written]
        first = 0
        for model, lines in self._closed:
            pieces = -(-lines // longest)
            # Even pieces: a shard of one left-over line costs a lease like any other.
            cuts = [first + lines * piece // pieces for piece in range(pieces + 1)]
            for start, end in pairwise(cuts):
                offset = bounds[start]
                yield NewShard(offset=offset, length=bounds[end] - offset, lines=end - start, model=model)
            first += lines
