"""Wires between processes and a server that a test can cut, hold up or make slow."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from threading import Thread

_CHUNK = 1 << 16
_SLOW_CHUNK = 4096
_SLOW_SECONDS = 0.02


class Fate(StrEnum):
    CARRIED = "carried"
    CUT = "cut"
    """Connections are reset, and so are new ones."""
    STALLED = "stalled"
    """Nothing comes through and nothing is closed; what was sent arrives when the wire works again."""
    SLOW = "slow"
    """Some 200 KB a second, and 20 ms later."""


class Wire:
    """A TCP proxy in a thread of its own."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._fate = Fate.CARRIED
        self._loop = asyncio.new_event_loop()
        self._connections: set[asyncio.StreamWriter] = set()
        self._flows = asyncio.Event()
        self._over = asyncio.Event()
        self._listening: asyncio.Future[int] = self._loop.create_future()
        self._thread = Thread(target=self._loop.run_until_complete, args=(self._run(),), daemon=True)
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._port(), self._loop).result()

    def become(self, fate: Fate) -> None:
        self._loop.call_soon_threadsafe(self._become, fate)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()
        self._loop.close()

    async def _port(self) -> int:
        return await self._listening

    async def _run(self) -> None:
        self._flows.set()
        async with asyncio.TaskGroup() as group:
            carrying: list[asyncio.Task[None]] = []
            server = await asyncio.start_server(
                lambda reader, writer: carrying.append(group.create_task(self._carry(reader, writer))), "127.0.0.1", 0
            )
            self._listening.set_result(server.sockets[0].getsockname()[1])
            await self._over.wait()
            server.close()
            self._become(Fate.CUT)
            for each in carrying:
                each.cancel()

    def _become(self, fate: Fate) -> None:
        self._fate = fate
        if fate is Fate.STALLED:
            self._flows.clear()
        else:
            self._flows.set()
        if fate is Fate.CUT:
            for connection in self._connections:
                connection.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._fate is Fate.CUT:
            writer.transport.abort()
            return
        with suppress(OSError):
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
            self._connections |= {writer, server_writer}
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, server_writer))
                group.create_task(self._pump(server_reader, writer))
            self._connections -= {writer, server_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_SLOW_CHUNK if self._fate is Fate.SLOW else _CHUNK):
                if self._fate is Fate.SLOW:
                    await asyncio.sleep(_SLOW_SECONDS)
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
            await self._flows.wait()
        writer.close()


@contextmanager
def wire_to(port: int) -> Iterator[Wire]:
    wire = Wire(port)
    try:
        yield wire
    finally:
        wire.close()
