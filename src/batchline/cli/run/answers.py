"""Prints answers as they come, and puts saved results in the order of the input."""

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import DecodeError, Struct
from msgspec.json import Decoder

from batchline import durable
from batchline.cli.run.result_lines import decode_line
from batchline.domain.input_lines import InputLines

if TYPE_CHECKING:
    from batchline.cli.run.steps import Steps


class AnswerPrinter:
    """Prints each answer of a batch to stdout once, in the order of recording."""

    def __init__(self, steps: "Steps", batch_id: str) -> None:
        self._steps, self._batch_id = steps, batch_id
        self._cursor: str | None = None

    def print_new(self) -> None:
        """Print the answers that were recorded since the last call."""
        while (page := self._steps.recorded_answers(self._batch_id, after=self._cursor)).data:
            for line in page.data:
                sys.stdout.buffer.write(bytes(line) + b"\n")
            sys.stdout.buffer.flush()
            self._cursor = page.last_id


class _Named(Struct):
    custom_id: str | None = None


_named = Decoder(_Named)


def put_in_order(source: Path, *results: Path) -> None:
    """Sort the lines of files of results by the place of their request in the input. Lines without one come last."""
    places = {custom_id: place for place, (custom_id, _, _) in enumerate(_lines(source)) if custom_id is not None}
    for path in results:
        _sort(path, places)


def _sort(path: Path, places: dict[str, int]) -> None:
    """Write the lines of a file in order, one at a time: only their places are held in memory.

    The last line of another server's file may have no end, and it may not be the last any more.
    """
    lines = sorted(_lines(path), key=lambda line: places.get(line[0] or "", math.inf))
    part = path.with_name(f"{path.name}.part")
    with path.open("rb") as unsorted, part.open("wb") as file:
        for _, begin, length in lines:
            unsorted.seek(begin)
            file.write(unsorted.read(length).rstrip(b"\r\n") + b"\n")
        file.flush()
        durable.sync(file.fileno())
    durable.replace(part, path)


def _lines(path: Path) -> list[tuple[str | None, int, int]]:
    """Return the custom_id, the offset and the length of each line. The id is None if the line has no readable one."""
    found, begin, counted = [], 0, InputLines()
    with path.open("rb") as file:
        for line in file:
            text = counted.take(line)
            if text is not None:
                found.append((_custom_id(text), begin, len(line)))
            begin += len(line)
    return found


def _custom_id(text: bytes) -> str | None:
    try:
        return decode_line(_named, text).custom_id
    except DecodeError:
        return None
