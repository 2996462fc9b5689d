"""Shows the lines of a batch in the order of its input, each with its request and its answer.

An input file and the results of a batch are in different orders, and neither says where line N is. So the first call
reads both once and keeps a small index in memory: where each request begins, and where each result is. The results of a
running batch grow, and each further call reads on from where the last one ended.
"""

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from enum import StrEnum

from msgspec import DecodeError, Struct
from msgspec.json import Decoder

from batchline.domain.errors import BatchNotFound, NotFound, ObjectMissing
from batchline.domain.input_lines import InputLines
from batchline.domain.records import Batch, File
from batchline.domain.result_lines import index_of
from batchline.domain.result_order import START, Cursor
from batchline.domain.states import TERMINAL
from batchline.pipeline.line_reader import read_lines
from batchline.pipeline.results import ResultReader
from batchline.pipeline.turns import Turns
from batchline.ports import Batches, Files, Objects, StoreClock

_KEPT_BATCHES = 8
"""An index of 50,000 lines takes about 5 MB."""
_PARALLEL_BUILDS = 2
"""Reading the results of a large batch takes most of a second of CPU, in small steps."""
_KEPT_ID_CHARACTERS = 200
_LISTED_REQUEST_BYTES = 256 * 1024
"""A page of lines has at most so much of each request."""
_SHOWN_REQUEST_BYTES = 8 * 1024 * 1024
"""One line that is looked at is read up to this size, eight times the size that a line may have by default."""


class LineState(StrEnum):
    """The state of a line."""

    WAITING = "waiting"
    SUCCEEDED = "succeeded"
    FAILED = "failed"


_STATES = (LineState.WAITING, LineState.SUCCEEDED, LineState.FAILED)
_WAITING, _SUCCEEDED, _FAILED = range(3)


class ShownLine(Struct, frozen=True, kw_only=True):
    """One line of a batch. ``number`` is counted from 1."""

    number: int
    custom_id: str
    state: LineState
    code: str | None
    request: bytes | None
    """The line of the input file, or None if that was deleted. Of a large one it is the beginning."""
    result: bytes | None
    """The line of the output or error file, or None if there is none yet."""
    request_bytes: int = 0
    """The size of the whole request."""

    @property
    def is_request_cut(self) -> bool:
        return self.request is not None and len(self.request) < self.request_bytes


class LinePage(Struct, frozen=True, kw_only=True):
    """Some lines of a batch, and the number of lines that match the filter."""

    batch: Batch
    codes: list[str]
    """The codes of all lines that failed."""
    lines: list[ShownLine]
    matches: int
    page: int
    pages: int
    has_input: bool
    """Whether the input file still exists."""


class LineFilter(Struct, frozen=True, kw_only=True):
    """The conditions that shown lines meet. The text is part of their ``custom_id``."""

    state: LineState | None = None
    code: str | None = None
    text: str = ""


class _InputLine(Struct):
    custom_id: str = ""


class _Error(Struct):
    code: str = ""


class _ResultLine(Struct):
    custom_id: str | None = None
    error: _Error | None = None


_input_line, _result_line = Decoder(_InputLine).decode, Decoder(_ResultLine).decode


class _Requests:
    """The places and the custom_ids of the lines of one input file."""

    def __init__(self) -> None:
        self.starts, self.lengths = array("Q"), array("Q")
        self.custom_ids: list[str] = []


class _Index:
    """The places of the requests and the results of one batch."""

    def __init__(self, total: int) -> None:
        self.lock = asyncio.Lock()
        self.total = total
        self.input: File | None = None
        self.starts, self.lengths = array("Q"), array("Q")
        self.custom_ids: list[str] = []
        """Empty until the whole input was read."""
        self.states = bytearray(total)
        self.codes: dict[int, str] = {}
        self.segments, self.offsets = array("Q", bytes(8 * total)), array("Q", bytes(8 * total))
        """For each result, the cursor from which it is read."""
        self.cursor = START
        self.complete = False

    def add_result(self, before: Cursor, line: bytes) -> None:
        index = index_of(line)
        if index >= self.total:
            return
        code, custom_id = _read_result(line)
        self.segments[index], self.offsets[index] = before
        self.states[index] = _SUCCEEDED if code is None else _FAILED
        if code is not None:
            self.codes[index] = code
        if self.input is None:
            self.custom_ids[index] = custom_id

    def matching(self, wanted: LineFilter) -> Sequence[int]:
        """Return the lines that match a filter, in the order of the input."""
        found: Sequence[int] = range(self.total)
        if wanted.state is not None:
            state = _STATES.index(wanted.state)
            found = [index for index in found if self.states[index] == state]
        if wanted.code is not None:
            found = [index for index in found if self.codes.get(index) == wanted.code]
        if wanted.text:
            found = [index for index in found if wanted.text in self.custom_ids[index]]
        return found


def _read_result(line: bytes) -> tuple[str | None, str]:
    """Return the code of a line that failed, and the custom_id."""
    try:
        read = _result_line(line)
    except (DecodeError, UnicodeDecodeError):
        return None, ""
    code = None if read.error is None else read.error.code
    return code, (read.custom_id or "")[:_KEPT_ID_CHARACTERS]


class LineTable:
    """Shows lines of batches."""

    def __init__(
        self, *, files: Files, batches: Batches, objects: Objects, reader: ResultReader, clock: StoreClock
    ) -> None:
        self._files, self._batches, self._objects = files, batches, objects
        self._reader, self._clock = reader, clock
        self._indexes: OrderedDict[str, _Index] = OrderedDict()
        self._turns = Turns(_PARALLEL_BUILDS)

    async def page(self, project_id: str, batch_id: str, wanted: LineFilter, *, page: int, size: int) -> LinePage:
        """Return a page of the lines that match. Raise BatchNotFound or ResultsUnavailable."""
        batch, index = await self._index(project_id, batch_id)
        found = index.matching(wanted)
        pages = max(1, -(-len(found) // size))
        page = max(1, min(page, pages))
        shown = found[(page - 1) * size : page * size]
        return LinePage(
            batch=batch,
            codes=sorted(set(index.codes.values())),
            lines=await self._lines(project_id, batch_id, index, shown, limit=_LISTED_REQUEST_BYTES),
            matches=len(found),
            page=page,
            pages=pages,
            has_input=index.input is not None,
        )

    async def line(self, project_id: str, batch_id: str, number: int) -> tuple[Batch, ShownLine]:
        """Return a batch and one of its lines, counted from 1. Raise BatchNotFound, NotFound or ResultsUnavailable."""
        batch, index = await self._index(project_id, batch_id)
        if not 1 <= number <= index.total:
            raise NotFound(f"Batch {batch_id} has no line {number}")
        [line] = await self._lines(project_id, batch_id, index, [number - 1], limit=_SHOWN_REQUEST_BYTES)
        return batch, line

    async def _index(self, project_id: str, batch_id: str) -> tuple[Batch, _Index]:
        batch = await self._batches.batch(project_id, batch_id)
        if batch is None:
            raise BatchNotFound(batch_id)
        index = self._indexes.get(batch_id)
        if index is None or index.total != batch.total:
            index = self._indexes[batch_id] = _Index(batch.total)
        self._indexes.move_to_end(batch_id)
        while len(self._indexes) > _KEPT_BATCHES:
            self._indexes.popitem(last=False)
        async with index.lock:
            await self._bring_up_to_date(index, batch)
        return batch, index

    async def _bring_up_to_date(self, index: _Index, batch: Batch) -> None:
        async with self._turns.turn(batch.project_id):
            if not index.custom_ids:
                await self._read_input(index, batch)
            elif index.input is not None and await self._input_of(batch) is None:
                index.input = None
            if not index.complete:
                await self._read_results(index, batch)

    async def _input_of(self, batch: Batch) -> File | None:
        return await self._files.file(batch.project_id, batch.input_file_id, at=int(self._clock.due()))

    async def _read_input(self, index: _Index, batch: Batch) -> None:
        """Find the requests. The index changes only after all were found, so that a read that fails is repeated."""
        file, requests = await self._input_of(batch), _Requests()
        if file is not None:
            try:
                requests = await self._divide(file, batch.total)
                index.input = file
            except ObjectMissing:
                index.input = None
        index.starts, index.lengths = requests.starts, requests.lengths
        index.custom_ids = requests.custom_ids + [""] * (batch.total - len(requests.custom_ids))

    async def _divide(self, file: File, total: int) -> _Requests:
        """Return the places of the lines of an input file. Blank ones do not count (C4)."""
        at, counted, requests = 0, InputLines(), _Requests()
        async for lines in read_lines(self._objects, file.object_key, file.bytes):
            for line in lines:
                text = counted.take(line)
                if text is not None and counted.count <= total:
                    requests.starts.append(at + line.index(text))
                    requests.lengths.append(len(text))
                    requests.custom_ids.append(_custom_id_of(text))
                at += len(line)
        return requests

    async def _read_results(self, index: _Index, batch: Batch) -> None:
        """Read on from where the last call ended. Lines that were recorded after this call began may be left out."""
        stream = await self._reader.open(batch.project_id, batch.id, after=index.cursor, status=None)
        recorded = batch.completed + batch.failed
        while lines := await stream.read():
            before = index.cursor
            for placed in lines:
                start = before if before.segment == placed.cursor.segment else Cursor(placed.cursor.segment, 0)
                index.add_result(start, placed.line)
                before = placed.cursor
            index.cursor = before
            if batch.status not in TERMINAL and self._count(index) >= recorded:
                return
        index.complete = stream.ended and batch.status in TERMINAL

    @staticmethod
    def _count(index: _Index) -> int:
        return index.total - index.states.count(_WAITING)

    async def _lines(
        self, project_id: str, batch_id: str, index: _Index, shown: Sequence[int], *, limit: int
    ) -> list[ShownLine]:
        results = await self._results(project_id, batch_id, index, shown)
        requests = await self._requests(index, shown, limit=limit)
        return [
            ShownLine(
                number=each + 1,
                custom_id=index.custom_ids[each],
                state=_STATES[index.states[each]],
                code=index.codes.get(each),
                request=requests.get(each),
                result=results.get(each),
                request_bytes=index.lengths[each] if each in requests else 0,
            )
            for each in shown
        ]

    async def _requests(self, index: _Index, shown: Sequence[int], *, limit: int) -> dict[int, bytes]:
        """Return the requests of lines, cut at a limit. Those that are near each other are read together."""
        requests: dict[int, bytes] = {}
        if index.input is None:
            return requests
        for group in _near([each for each in shown if each < len(index.starts)], index):
            start, last = index.starts[group[0]], group[-1]
            length = index.starts[last] + min(index.lengths[last], limit) - start
            try:
                data = await self._objects.read(index.input.object_key, start, length)
            except ObjectMissing:
                return {}
            for each in group:
                at = index.starts[each] - start
                requests[each] = data[at : at + min(index.lengths[each], limit)]
        return requests

    async def _results(self, project_id: str, batch_id: str, index: _Index, shown: Sequence[int]) -> dict[int, bytes]:
        """Return the results of lines. Those of one segment are read together."""
        first: dict[int, int] = {}
        for each in shown:
            if index.states[each] != _WAITING:
                segment, offset = index.segments[each], index.offsets[each]
                first[segment] = min(first.get(segment, offset), offset)
        wanted = set(shown)
        lines = await self._reader.read_segments(project_id, batch_id, first)
        return {each: line for line in lines if (each := index_of(line)) in wanted}


def _near(shown: Sequence[int], index: _Index) -> list[list[int]]:
    """Divide lines into groups that are each read at once. A group has at most as many bytes as one listed request."""
    groups: list[list[int]] = []
    for each in shown:
        if groups and index.starts[each] + index.lengths[each] - index.starts[groups[-1][0]] <= _LISTED_REQUEST_BYTES:
            groups[-1].append(each)
        else:
            groups.append([each])
    return groups


def _custom_id_of(line: bytes) -> str:
    try:
        return _input_line(line).custom_id[:_KEPT_ID_CHARACTERS]
    except (DecodeError, UnicodeDecodeError):
        return ""
