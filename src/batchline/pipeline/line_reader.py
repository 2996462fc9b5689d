"""Reads an object line by line, with one chunk in memory."""

from collections.abc import AsyncIterator

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
