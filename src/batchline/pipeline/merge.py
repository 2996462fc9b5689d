"""Merges the results of a batch with those of the batches that ran its failed lines again.

One pass over the result files notes where the result of each line is: its newest success, else its newest failure. Then
the lines are read in the order of the input, as many at a time as fit into a window. Lines that are near each other in
the input are mostly near each other in a file too, so a window takes few reads.
"""

from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol

from batchline.domain.errors import BatchNotFound, Conflict, Damaged, FileDamaged, ObjectMissing, ResultsUnavailable
from batchline.domain.records import Batch, File
from batchline.domain.result_lines import custom_id_of, index_of
from batchline.domain.states import TERMINAL
from batchline.pipeline.damage import DamageLog
from batchline.pipeline.line_reader import read_intact_lines
from batchline.ports import Files, Objects, Results, StoreClock

_WINDOW_BYTES = 8 * 1024 * 1024
_GAP_BYTES = 64 * 1024
"""Lines with at most this between them are read together."""
_READ_BYTES = 4 * 1024 * 1024
_NOWHERE = -1


class _Store(Files, Results, Protocol):
    pass


class _ResultFile(NamedTuple):
    """A result file, and whether its batch is the one whose input decides the order."""

    file: File
    is_root: bool


class Merger:
    """Merges the results of batches."""

    def __init__(self, *, store: _Store, objects: Objects, clock: StoreClock, damage_log: DamageLog) -> None:
        self._store, self._objects, self._clock, self._damage_log = store, objects, clock, damage_log

    async def open(self, project_id: str, batch_id: str) -> AsyncGenerator[bytes]:
        """Return one line for each line of the batch's input, in chunks.

        Raise BatchNotFound, Conflict if the batch is not a root or its lineage has not ended, ResultsUnavailable, or
        FileDamaged.
        """
        batches = await self._store.lineage(project_id, batch_id)
        if batches is None:
            raise BatchNotFound(batch_id)
        root = batches[0]
        if root.parent_batch_id is not None:
            raise Conflict(
                f"Batch {batch_id} runs failed lines of {root.parent_batch_id} again: merge the first batch",
                code="not_a_root_batch",
            )
        for batch in batches:
            if batch.status not in TERMINAL:
                raise Conflict(f"Batch {batch.id} is {batch.status} and has not ended", code="batch_not_terminal")
        files = [found for batch in batches for found in await self._files(batch, is_root=batch is root)]
        places = _Places(root.total, with_ids=len(batches) > 1)
        for number, found in enumerate(files):
            await self._scan(number, found, places)
        return self._merged(files, places)

    async def _files(self, batch: Batch, *, is_root: bool) -> list[_ResultFile]:
        """Return the files of a batch: the successes last, because they take the place of failures."""
        found = []
        for file_id in (batch.error_file_id, batch.output_file_id):
            if file_id is not None:
                file = await self._store.file(batch.project_id, file_id, at=int(self._clock.due()))
                if file is None:
                    raise ResultsUnavailable(batch.id)
                found.append(_ResultFile(file, is_root))
        return found

    async def _scan(self, number: int, found: _ResultFile, places: "_Places") -> None:
        """Note the place of each line of a file. Raise FileDamaged."""
        file, offset = found.file, 0
        try:
            async for lines in read_intact_lines(self._objects, file):
                for line in lines:
                    places.note(line, number, offset, found)
                    offset += len(line)
        except (Damaged, ObjectMissing) as error:
            self._damage_log.report("file", key=file.object_key, file_id=file.id)
            raise FileDamaged(file.id) from error

    async def _merged(self, files: Sequence[_ResultFile], places: "_Places") -> AsyncGenerator[bytes]:
        for window in places.windows():
            lines: dict[int, bytes] = {}
            for run in places.runs(window):
                key = files[places.file[run[0]]].file.object_key
                start = places.offset[run[0]]
                length = places.offset[run[-1]] + places.length[run[-1]] - start
                data = await self._objects.read(key, start, length)
                for index in run:
                    at = places.offset[index] - start
                    lines[index] = data[at : at + places.length[index]]
            yield b"".join(lines[index] for index in window)


class _Places:
    """The place of the result of each line: about 30 bytes a line, and 100 more if there are reruns."""

    def __init__(self, total: int, *, with_ids: bool) -> None:
        self.file = array("l", [_NOWHERE]) * total
        self.offset = array("q", [0]) * total
        self.length = array("q", [0]) * total
        self._succeeded = bytearray(total)
        self._indexes: dict[bytes, int] | None = {} if with_ids else None

    def note(self, line: bytes, number: int, offset: int, found: _ResultFile) -> None:
        """Take a line as the result of its line of the root. A failure never replaces an earlier success."""
        index = self._index(line, is_root=found.is_root)
        if index is None or (found.file.is_error and self._succeeded[index]):
            return
        self.file[index], self.offset[index], self.length[index] = number, offset, len(line)
        self._succeeded[index] = not found.file.is_error

    def _index(self, line: bytes, *, is_root: bool) -> int | None:
        """Return the index of the line of the root that a result is about; None if damage destroyed its custom_id."""
        index = index_of(line) if is_root else None
        if self._indexes is None or (custom_id := custom_id_of(line)) is None:
            return index
        digest = blake2b(custom_id, digest_size=16).digest()
        if index is None:
            return self._indexes.get(digest)
        self._indexes[digest] = index
        return index

    def windows(self) -> Iterator[list[int]]:
        """Yield the lines in groups that fit into a window, in the order of the input."""
        window: list[int] = []
        space = _WINDOW_BYTES
        for index, number in enumerate(self.file):
            if number == _NOWHERE:
                continue
            if window and self.length[index] > space:
                yield window
                window, space = [], _WINDOW_BYTES
            window.append(index)
            space -= self.length[index]
        if window:
            yield window

    def runs(self, window: list[int]) -> Iterator[list[int]]:
        """Yield the lines of a window in groups that are near each other in one file, in the order of the file."""
        run: list[int] = []
        for index in sorted(window, key=lambda index: (self.file[index], self.offset[index])):
            if run and not self._is_near(run[0], run[-1], index):
                yield run
                run = []
            run.append(index)
        if run:
            yield run

    def _is_near(self, first: int, last: int, index: int) -> bool:
        gap = self.offset[index] - self.offset[last] - self.length[last]
        size = self.offset[index] + self.length[index] - self.offset[first]
        return self.file[index] == self.file[last] and gap <= _GAP_BYTES and size <= _READ_BYTES
