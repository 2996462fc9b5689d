"""Opens the objects of a bucket, and provides a TCP proxy to it that can be paused and cut."""

import asyncio
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from batchline.objects.bucket import BucketObjects
from batchline.system import SystemRandom, ThreadPool

LARGE = bytes(range(256)) * 8192 * 6
"""Two parts of an upload, and less than a third."""


@asynccontextmanager
async def opened(url: str, scratch: Path) -> AsyncIterator[BucketObjects]:
    """Open the objects of a bucket."""
    threads = ThreadPool(4, name="objects")
    objects = BucketObjects.open(url, threads=threads, random=SystemRandom(), scratch=scratch)
    try:
        yield objects
    finally:
        objects.close()
        threads.close()


class Wire:
    """A TCP proxy between a client and a server on this machine."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._carrying: dict[asyncio.Task[None], list[StreamWriter]] = {}
        self.connections = 0
        self.downloads = 0
        """The bytes that a connection may carry to the client before it is cut; 0 for any number."""
        self.uploads = 0
        """The same for bytes to the server."""
        self.seen, self.free = asyncio.Event(), asyncio.Event()
        """``seen``: the client has sent something. ``free``: it may be passed on to the server."""
        self.free.set()

    async def carry(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Carry one connection until it is cut or ends."""
        carrying = asyncio.current_task()
        assert carrying is not None
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._carrying[carrying] = [writer, far_writer]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._send(reader, far_writer))
                group.create_task(self._bring(far_reader, writer))
        except* (ConnectionError, _Cut):
            _abort(self._carrying.pop(carrying))

    async def end(self) -> None:
        """Cut all connections that are left."""
        left = dict(self._carrying)
        for ends in left.values():
            _abort(ends)
        if left:
            await asyncio.wait(left)

    async def _send(self, reader: StreamReader, writer: StreamWriter) -> None:
        sent = 0
        while data := await reader.read(65536):
            self.seen.set()
            await self.free.wait()
            sent = await _pass_on(data, writer, sent=sent, most=self.uploads)
        raise _Cut

    async def _bring(self, reader: StreamReader, writer: StreamWriter) -> None:
        sent = 0
        while data := await reader.read(65536):
            sent = await _pass_on(data, writer, sent=sent, most=self.downloads)
        raise _Cut


class _Cut(Exception):
    pass


def _abort(ends: list[StreamWriter]) -> None:
    for each in ends:
        each.transport.abort()


async def _pass_on(data: bytes, writer: StreamWriter, *, sent: int, most: int) -> int:
    sent += len(data)
    if most and sent > most:
        raise _Cut
    writer.write(data)
    await writer.drain()
    return sent


@asynccontextmanager
async def wire_to(port: int) -> AsyncIterator[tuple[Wire, str]]:
    """Start a proxy to a port, and provide it with the URL that clients use."""
    wire = Wire(port)
    server = await asyncio.start_server(wire.carry, "127.0.0.1", 0)
    try:
        yield wire, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await wire.end()
