"""Provides a TCP proxy between a store and PostgreSQL that a test can cut at the worst moment."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from tests.support.service import PATIENCE

COMMIT = b"COMMIT\0"


class Wire:
    """A TCP proxy.

    ``on_commit`` decides about each COMMIT: "carry" it, "lose the answer", or "lose it". While ``silent`` is set, what
    the server sends is dropped. While ``silent_from_now_on`` is set, new connections get no answer.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._connections: list[asyncio.StreamWriter] = []
        self.port = 0
        self.on_commit: Callable[[], str] = lambda: "carry"
        self.silent = self.silent_from_now_on = False
        self.lost = asyncio.Event()
        self._asked = asyncio.Semaphore(0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.silent_from_now_on:
            self._connections.append(writer)
            self._asked.release()
            return
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._connections += [writer, server_writer]
        try:
            async with asyncio.TaskGroup() as group:
                answers = group.create_task(self._carry(server_reader, writer))
                await self._carry_requests(reader, server_writer, answers)
        except* OSError:
            # One of both ends closed its connection.
            pass

    async def asked_in_vain(self, *, times: int) -> None:
        """Wait until so many new connections got no answer."""
        for _ in range(times):
            await self._asked.acquire()

    def cut_all(self) -> None:
        for connection in self._connections:
            connection.transport.abort()

    async def _carry_requests(
        self, reader: asyncio.StreamReader, server: asyncio.StreamWriter, answers: "asyncio.Task[None]"
    ) -> None:
        client = self._connections[self._connections.index(server) - 1]
        while data := await reader.read(1 << 16):
            fate = self.on_commit() if data.endswith(COMMIT) else "carry"
            if fate == "carry":
                server.write(data)
                continue
            answers.cancel()
            if fate == "lose the answer":
                server.write(data)
                await server.drain()
            client.transport.abort()
            self.lost.set()
            # The connection to the server stays open, as it does if a machine loses its network.
            await asyncio.sleep(PATIENCE)
        server.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if not self.silent:
                writer.write(data)
        if self.silent:
            # The client does not see that the server closed the connection either.
            await asyncio.sleep(PATIENCE)
        writer.close()


@asynccontextmanager
async def wired(port: int) -> AsyncIterator[Wire]:
    wire = Wire(port)
    async with asyncio.TaskGroup() as group:
        serving: list[asyncio.Task[None]] = []

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not server.is_serving():
                # The connection was made just before the end of the test.
                writer.transport.abort()
                return
            serving.append(group.create_task(wire.serve(reader, writer)))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        wire.port = server.sockets[0].getsockname()[1]
        try:
            yield wire
        finally:
            server.close()
            wire.cut_all()
            for task in serving:
                task.cancel()
