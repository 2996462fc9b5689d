"""Reads the result files of an ended batch, and the custom_ids of its input file."""

from dataclasses import dataclass

from msgspec import DecodeError, Struct
from msgspec.json import Decoder

from batchline.domain.checksum import Checksum
from batchline.domain.errors import Damaged
from batchline.domain.input_lines import InputLines
from batchline.domain.records import File, InspectedFile
from batchline.domain.states import FileState
from batchline.fsck.reading import ObjectReader, Unreadable
from batchline.fsck.tally import LineNumbers, LineTally
from batchline.ports import InspectedBatch


class _Request(Struct):
    custom_id: str


_request = Decoder(_Request)


@dataclass
class ResultCheck:
    """The lines of the result files of a batch. A file that was deleted or has expired cannot be compared."""

    tally: LineTally
    damaged: list[tuple[InspectedFile, str]]
    knows_output: bool
    """Whether all lines of the output file are known."""
    knows_errors: bool

    @property
    def knows_all(self) -> bool:
        """Whether all lines of both files are known."""
        return self.knows_output and self.knows_errors


class ResultFileReader:
    """Streams result files."""

    def __init__(self, reader: ObjectReader) -> None:
        self._reader = reader

    async def check(self, rows: InspectedBatch) -> ResultCheck:
        """Read both result files, as far as they are stored."""
        batch, tally = rows.batch, LineTally(rows.batch)
        found = ResultCheck(tally, [], batch.output_file_id is None, batch.error_file_id is None)
        for file_id, is_error in ((batch.output_file_id, False), (batch.error_file_id, True)):
            file = rows.files.get(file_id or "")
            if file is None or file.state is not FileState.STORED:
                continue
            try:
                await self._count(file, tally, is_error=is_error)
            except (Unreadable, Damaged) as error:
                found.damaged.append((file, str(error)))
                continue
            if is_error:
                found.knows_errors = True
            else:
                found.knows_output = True
        return found

    async def renamed(self, file: InspectedFile, tally: LineTally) -> LineNumbers:
        """Return the lines whose result has another custom_id than in the input file, if that can be read."""
        found, counted = LineNumbers(), InputLines()
        try:
            async for line in self._reader.lines(file.object_key, file.bytes):
                text = counted.take(line)
                if text is not None and tally.differs(counted.count - 1, _request.decode(text).custom_id):
                    found.add(counted.count - 1)
        except (Unreadable, DecodeError, UnicodeDecodeError):
            # The check of files reports an input file that is damaged.
            return LineNumbers()
        return found

    async def verify(self, file: File) -> None:
        """Raise Unreadable unless a file that no batch names has the bytes that were stored."""
        read = Checksum()
        async for line in self._reader.lines(file.object_key, file.bytes + 1):
            read.update(line)
        _verify(file, read)

    async def _count(self, file: File, tally: LineTally, *, is_error: bool) -> None:
        read = Checksum()
        damage: Damaged | None = None
        async for line in self._reader.lines(file.object_key, file.bytes + 1):
            read.update(line)
            try:
                if damage is None:
                    tally.add(line, is_error=is_error)
            except Damaged as error:
                damage = error
        _verify(file, read)
        if damage is not None:
            raise Unreadable(f"has {damage}")


def _verify(file: File, read: Checksum) -> None:
    if read.bytes != file.bytes:
        raise Unreadable(f"has {'more' if read.bytes > file.bytes else 'fewer'} than the {file.bytes} bytes of its row")
    if file.checksum not in (None, read.value):
        raise Unreadable("is not what was written: its checksum differs")
