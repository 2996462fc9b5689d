"""Finds the lines with a custom_id in the recent batches of a project.

There is no row per line, so the input files are read, newest batch first. One search reads at most a fixed number of
bytes and of batches; then it says where the next one goes on.
"""

import re

from msgspec import DecodeError, Struct
from msgspec.json import Decoder

from batchline.domain.errors import ObjectMissing
from batchline.domain.input_lines import InputLines
from batchline.domain.records import Batch, File
from batchline.pipeline.line_reader import read_lines
from batchline.pipeline.turns import Turns
from batchline.ports import Batches, Files, Objects, StoreClock

MAX_SEARCHED_BYTES = 64 * 1024 * 1024
"""A disk reads these in a fraction of a second, and a bucket in about one second."""
MAX_SEARCHED_BATCHES = 50
_MAX_MATCHES = 50
_PARALLEL_SEARCHES = 2
_PATTERN_CHARACTERS = 64
"""The characters of a custom_id that are looked for in the bytes of a file. All of them are compared with the lines in
which these were found."""
_MAX_SPELLING_BYTES = len(rb"\ud83d\ude00")
_MAX_MATCH_BYTES = len('""') + _PATTERN_CHARACTERS * _MAX_SPELLING_BYTES
_SHORT_ESCAPES = {'"': b'"', "\\": b"\\", "/": b"/", "\b": b"b", "\f": b"f", "\n": b"n", "\r": b"r", "\t": b"t"}


class FoundLine(Struct, frozen=True, kw_only=True):
    """A line with the custom_id; ``number`` is counted from 1."""

    batch: Batch
    number: int


class LineSearchResult(Struct, frozen=True, kw_only=True):
    """The lines that were found, and the extent of the search."""

    lines: list[FoundLine]
    batches: int
    """The batches whose input was searched."""
    bytes: int
    deleted: int
    """The batches whose input file does not exist any more."""
    next: str | None
    """The batch behind which a further search goes on, or None if all batches were searched."""


class _InputLine(Struct):
    custom_id: str = ""


_input_line = Decoder(_InputLine).decode


class LineSearch:
    """Searches the input files of batches."""

    def __init__(self, *, files: Files, batches: Batches, objects: Objects, clock: StoreClock) -> None:
        self._files, self._batches, self._objects, self._clock = files, batches, objects, clock
        self._turns = Turns(_PARALLEL_SEARCHES)

    async def find(self, project_id: str, custom_id: str, *, after: str | None) -> LineSearchResult | None:
        """Search the batches that are older than ``after``, newest first; None if the project has no such batch."""
        page = await self._batches.batches(project_id, after=after, limit=MAX_SEARCHED_BATCHES + 1)
        if page is None:
            return None
        async with self._turns.turn(project_id):
            return await self._search(page, custom_id)

    async def _search(self, page: list[Batch], custom_id: str) -> LineSearchResult:
        lines: list[FoundLine] = []
        searched = size = deleted = 0
        last: str | None = None
        for batch in page[:MAX_SEARCHED_BATCHES]:
            file = await self._files.file(batch.project_id, batch.input_file_id, at=int(self._clock.due()))
            # The first file is always searched. Otherwise a search that begins with a large one would never end.
            if len(lines) >= _MAX_MATCHES or (file and searched and size + file.bytes > MAX_SEARCHED_BYTES):
                break
            last = batch.id
            numbers = None if file is None else await self._numbers(file, custom_id)
            if file is None or numbers is None:
                deleted += 1
                continue
            searched, size = searched + 1, size + file.bytes
            lines += [FoundLine(batch=batch, number=number) for number in numbers]
        return LineSearchResult(
            lines=lines,
            batches=searched,
            bytes=size,
            deleted=deleted,
            next=last if page and last != page[-1].id else None,
        )

    async def _numbers(self, file: File, custom_id: str) -> list[int] | None:
        """Return the numbers of the lines with a custom_id, without blank ones (C4); None if the file was deleted."""
        wanted, numbers, counted = _WantedText(custom_id), list[int](), InputLines()
        try:
            if not await self._contains(file, wanted):
                return []
            async for lines in read_lines(self._objects, file.object_key, file.bytes):
                if not wanted.is_in(b"".join(lines)):
                    counted.skip(lines)
                    continue
                for line in lines:
                    text = counted.take(line)
                    if text is not None and wanted.is_in(text) and _has_custom_id(text, custom_id):
                        numbers.append(counted.count)
        except ObjectMissing:
            return None
        return numbers[:_MAX_MATCHES]

    async def _contains(self, file: File, wanted: "_WantedText") -> bool:
        """Return whether a file contains a text. That is cheaper than to look at each line."""
        rest = b""
        async for chunk in self._objects.stream(file.object_key, 0, file.bytes):
            window = rest + chunk
            if wanted.is_in(window):
                return True
            rest = window[-_MAX_MATCH_BYTES:]
        return False


class _WantedText:
    """A custom_id as a string in JSON, however its characters are escaped.

    Most files escape nothing. To look for the plain bytes takes a tenth of the time of the pattern. The pattern is
    linear in the bytes, because two spellings of a character differ in their first two bytes.
    """

    def __init__(self, custom_id: str) -> None:
        first, end = custom_id[:_PATTERN_CHARACTERS], b'"' if len(custom_id) <= _PATTERN_CHARACTERS else b""
        self._plain = b'"' + first.encode("utf-8", "replace") + end
        self._pattern = re.compile(b'"' + b"".join(map(_spellings, first)) + end)

    def is_in(self, text: bytes) -> bool:
        return self._plain in text or (b"\\" in text and self._pattern.search(text) is not None)


def _spellings(character: str) -> bytes:
    """Return a pattern of all spellings of a character in JSON: as it is, with a short escape, or by its number."""
    units = character.encode("utf-16-be", "surrogatepass")
    spellings = [b"".join(rb"\\u(?i:%04x)" % int.from_bytes(units[at : at + 2]) for at in range(0, len(units), 2))]
    if character in _SHORT_ESCAPES:
        spellings.insert(0, re.escape(b"\\" + _SHORT_ESCAPES[character]))
    if character not in '"\\':
        spellings.insert(0, re.escape(character.encode("utf-8", "replace")))
    return b"(?:" + b"|".join(spellings) + b")"


def _has_custom_id(line: bytes, custom_id: str) -> bool:
    try:
        return _input_line(line).custom_id == custom_id
    except (DecodeError, UnicodeDecodeError):
        return False
