"""Reads an object line by line, with one chunk in memory."""

from collections.abc import AsyncIterator

from batchline.domain.checksum import Checksum
from batchline.domain.errors import Damaged
from batchline.domain.records import File
from batchline.ports import Objects


async def read_lines(objects: Objects, key: str, size: int) -> AsyncIterator[list[bytes]]:
    """Yield the lines that end in each chunk of an object, with their ends, and a last line without one.

    Raise ObjectMissing.
    """
    rest = b""
    async for chunk in objects.stream(key, 0, size):
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            yield [line + b"\n" for line in lines]
    if rest:
        yield [rest]


async def read_intact_lines(objects: Objects, file: File) -> AsyncIterator[list[bytes]]:
    """Yield the lines of a whole file as ``read_lines`` does.

    Raise ObjectMissing, and behind the last line Damaged unless all bytes are those that were written.
    """
    read = Checksum()
    async for lines in read_lines(objects, file.object_key, file.bytes):
        for line in lines:
            read.update(line)
        yield lines
    if read.bytes != file.bytes or file.checksum not in (None, read.value):
        raise Damaged(file.object_key)
