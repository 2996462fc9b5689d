"""Counts the lines of result files or segments: which lines of the batch they are about, and what these used."""

from array import array

from msgspec.structs import replace

from batchline.domain.checksum import checksum_of
from batchline.domain.errors import Damaged
from batchline.domain.progress import LineErrors, count_errors
from batchline.domain.records import Batch
from batchline.domain.result_lines import read_result_line
from batchline.domain.usage import NOTHING, Usage, total

_UNKNOWN, _NULL, _FIRST_DIGEST = 0, 1, 2
_MAX_SHOWN = 5


class Tally:
    """The lines that were read. It takes 9 bytes for each line of the batch."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch.id.removeprefix("batch_")
        self._seen = bytearray(batch.total)
        self._custom_ids = array("Q", bytes(8 * batch.total))
        """For each line a digest of its custom_id, or whether it is unknown or null."""
        self._errors: dict[str, LineErrors] = {}
        self.succeeded = self.failed = 0
        self.usage: Usage = NOTHING
        self.repeated: list[int] = []
        self.foreign = 0

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
            if read.usage != NOTHING:
                self.usage = total((self.usage, read.usage))
        if read.batch != self._batch or read.index >= len(self._seen):
            self.foreign += 1
            return
        if self._seen[read.index]:
            self.repeated.append(read.index)
        self._seen[read.index] = 1
        self._custom_ids[read.index] = _NULL if read.custom_id is None else _digest(read.custom_id)

    def has(self, index: int) -> bool:
        """Return whether a line has a result."""
        return index < len(self._seen) and self._seen[index] == 1

    def missing(self) -> list[int]:
        """Return the indexes of the lines without a result."""
        return [index for index, seen in enumerate(self._seen) if not seen] if 0 in self._seen else []

    def differs(self, index: int, custom_id: str) -> bool:
        """Return whether a line has a result with another custom_id. A custom_id that was lost is null."""
        if not self.has(index):
            return False
        return self._custom_ids[index] not in (_UNKNOWN, _NULL, _digest(custom_id))

    @property
    def errors(self) -> list[LineErrors]:
        """The errors by code."""
        return list(self._errors.values())

    def _count_error(self, line: bytes) -> None:
        [error] = count_errors([line])
        known = self._errors.get(error.code)
        self._errors[error.code] = error if known is None else replace(known, count=known.count + 1)


def _digest(custom_id: str) -> int:
    return _FIRST_DIGEST + checksum_of(custom_id.encode())


def shown(indexes: list[int]) -> str:
    """Return the first of many lines for a message, counted from 1 as in the input file."""
    numbers = ", ".join(str(index + 1) for index in indexes[:_MAX_SHOWN])
    more = len(indexes) - _MAX_SHOWN
    return f"{'line' if len(indexes) == 1 else 'lines'} {numbers}" + (f" and {more} more" if more > 0 else "")
