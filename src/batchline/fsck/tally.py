"""Counts the lines of result files or segments: which lines of the batch they are about, and what these used."""

from array import array

from msgspec.structs import replace

from batchline.domain.checksum import checksum_of
from batchline.domain.errors import Damaged
from batchline.domain.progress import LineErrors, count_errors
from batchline.domain.records import Batch
from batchline.domain.result_lines import read_result_line
from batchline.domain.usage import Usage, total

_NULL, _FIRST_DIGEST = 1, 2
_MAX_SHOWN = 5
_USAGES_AT_ONCE = 256
"""The number of usages that are summed together, which is cheaper than one by one."""


class LineNumbers:
    """Lines that something is wrong with: how many, and the first of them. However many they are, it stays small."""

    def __init__(self) -> None:
        self.count = 0
        self._first: list[int] = []

    def add(self, index: int) -> None:
        """Add a line by its index."""
        self.count += 1
        if len(self._first) < _MAX_SHOWN:
            self._first.append(index)

    def __str__(self) -> str:
        """Return the lines for a message, counted from 1 as in the input file."""
        numbers = ", ".join(str(index + 1) for index in self._first)
        more = self.count - len(self._first)
        return f"{numbers} and {more} more" if more else numbers


class LineSet:
    """The lines of a batch that were seen. It grows with the lines that are seen, not with what a row says."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._seen = bytearray()
        self.repeated = LineNumbers()
        self.foreign = 0

    def add(self, index: int) -> bool:
        """Add a line, and return whether it is one of the batch."""
        if index >= self._total:
            self.foreign += 1
            return False
        if index >= len(self._seen):
            self._seen.extend(bytes(index + 1 - len(self._seen)))
        elif self._seen[index]:
            self.repeated.add(index)
        self._seen[index] = 1
        return True

    def __contains__(self, index: int) -> bool:
        """Return whether a line was seen."""
        return index < len(self._seen) and self._seen[index] == 1

    def missing(self) -> LineNumbers:
        """Return the lines that were not seen."""
        found, at = LineNumbers(), -1
        for _ in range(_MAX_SHOWN):
            at = self._seen.find(0, at + 1) if at + 1 < len(self._seen) else at + 1
            at = len(self._seen) if at < 0 else at
            if at >= self._total:
                break
            found.add(at)
        found.count = self._total - self._seen.count(1)
        return found


class LineTally:
    """The lines that were read. It takes 9 bytes for each line of the batch."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch.id.removeprefix("batch_")
        self._custom_ids = array("Q")
        """For each line a digest of its custom_id, or whether it is unknown or null."""
        self._errors: dict[str, LineErrors] = {}
        self._usages: list[Usage] = []
        self.lines = LineSet(batch.total)
        self.succeeded = self.failed = 0

    def add(self, line: bytes, *, is_error: bool) -> None:
        """Count one line. Raise Damaged if it is not a line of an output file, or of an error file."""
        read = read_result_line(line)
        if (read.usage is None) is not is_error:
            raise Damaged("a line of the other file")
        if read.usage is None:
            self.failed += 1
            self._count_error(line)
        else:
            self.succeeded += 1
            self._usages.append(read.usage)
            if len(self._usages) == _USAGES_AT_ONCE:
                self._usages = [total(self._usages)]
        if read.batch != self._batch:
            self.lines.foreign += 1
        elif self.lines.add(read.index):
            self._note_custom_id(read.index, read.custom_id)

    @property
    def usage(self) -> Usage:
        """The tokens of all lines."""
        return total(self._usages)

    @property
    def errors(self) -> list[LineErrors]:
        """The errors by code."""
        return list(self._errors.values())

    def differs(self, index: int, custom_id: str) -> bool:
        """Return whether a line has a result with another custom_id. A custom_id that was lost is null."""
        return index in self.lines and self._custom_ids[index] not in (_NULL, _digest(custom_id))

    def _note_custom_id(self, index: int, custom_id: str | None) -> None:
        if index >= len(self._custom_ids):
            self._custom_ids.frombytes(bytes(8 * (index + 1 - len(self._custom_ids))))
        self._custom_ids[index] = _NULL if custom_id is None else _digest(custom_id)

    def _count_error(self, line: bytes) -> None:
        [error] = count_errors([line])
        known = self._errors.get(error.code)
        self._errors[error.code] = error if known is None else replace(known, count=known.count + 1)


def _digest(custom_id: str) -> int:
    return _FIRST_DIGEST + checksum_of(custom_id.encode())
