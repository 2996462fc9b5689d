"""Says which lines of an input file count (C4): blank lines do not, and a byte order mark is part of no line.

Everything that numbers the lines of an input file asks here, so that all of them agree.
"""

from collections.abc import Sequence
from typing import BinaryIO

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"


class InputLines:
    """The lines of one input file, which are passed in order and counted."""

    def __init__(self) -> None:
        self._is_first = True
        self.count = 0
        """The number of lines so far that count."""

    def take(self, line: bytes) -> bytes | None:
        """Return the text of the next line, without the white space around it; None if the line does not count."""
        if self._is_first:
            self._is_first = False
            line = line.removeprefix(_BYTE_ORDER_MARK)
        text = line.strip(_BLANK)
        if not text:
            return None
        self.count += 1
        return text

    def skip(self, lines: Sequence[bytes]) -> None:
        """Count lines whose text is not needed."""
        if self._is_first and lines:
            self.take(lines[0])
            lines = lines[1:]
        self.count += sum(1 for line in lines if line.strip(_BLANK))


def skip_byte_order_mark(file: BinaryIO) -> None:
    """Move to where the first line of an input file begins."""
    if file.read(len(_BYTE_ORDER_MARK)) != _BYTE_ORDER_MARK:
        file.seek(0)


def is_blank(line: bytes) -> bool:
    """Return whether a line, or a part of one, is blank. The first line must be passed without a byte order mark."""
    return not line.strip(_BLANK)
